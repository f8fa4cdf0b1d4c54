"""Greedy tokens of a model by transformers, which shares no code with SGLang's scheduler and kernels.

`python reference.py MODEL < requests.json`, in an SGLang environment: a request is [prompt tokens, count].
The answer has for each its tokens, their logits' lead over the second best, and their log probabilities.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import LlamaForCausalLM


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> dict[str, list]:
    tokens: list[int] = []
    gaps: list[float] = []
    logprobs: list[float] = []
    step = model(torch.tensor([prompt]), use_cache=True)
    while True:
        best = step.logits[0, -1].topk(2)
        tokens.append(best.indices[0].item())
        gaps.append((best.values[0] - best.values[1]).item())
        logprobs.append(step.logits[0, -1].log_softmax(-1).max().item())
        if len(tokens) == count:
            return {"tokens": tokens, "gaps": gaps, "logprobs": logprobs}
        step = model(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    json.dump([greedy(model, prompt, count) for prompt, count in json.load(sys.stdin)], sys.stdout)
