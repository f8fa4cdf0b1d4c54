"""Greedy tokens of a model by transformers, which shares no code with SGLang's scheduler and kernels.

`python reference.py MODEL COUNT`, in an SGLang environment, prints eight prompts of different lengths, each with
the COUNT tokens that follow and their log probabilities. It takes only prompts after which no token is close to
a tie, so that whatever computes the same model must give the same tokens.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import LlamaForCausalLM

# An unpatched SGLang 0.5.23 without speculation, on the CPU, was off from transformers by up to 0.17 in the lead
# of the best logit over the second best (1280 tokens, float32). Three times that is no tie.
CLEAR = 0.5
LENGTHS = (3, 9, 17, 24, 31, 40, 48, 57)
CANDIDATES = 24


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompts: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, leads and log probabilities, a row a prompt; all prompts are of one length."""
    made = []
    step = model(prompts, use_cache=True)
    while len(made) < count:
        logits = step.logits[:, -1]
        best = logits.topk(2)
        tokens = best.indices[:, 0]
        lead = best.values[:, 0] - best.values[:, 1]
        made.append((tokens, lead, logits.log_softmax(-1).amax(-1)))
        step = model(tokens[:, None], past_key_values=step.past_key_values, use_cache=True)
    return tuple(torch.stack(column, 1) for column in zip(*made, strict=True))


def clearest(model: LlamaForCausalLM, length: int, count: int, dice: torch.Generator) -> dict[str, list]:
    prompts = torch.randint(3, 510, (CANDIDATES, length), generator=dice)
    tokens, leads, logprobs = greedy(model, prompts, count)
    least = leads.amin(1)
    best = int(least.argmax())
    if least[best] < CLEAR:
        sys.exit(f"no prompt of {length} tokens is clear of ties: {least[best]:.3f} at best")
    return {
        "prompt": prompts[best].tolist(),
        "tokens": tokens[best].tolist(),
        "logprobs": logprobs[best].tolist(),
        "least_lead": float(least[best]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    dice = torch.Generator().manual_seed(7)
    print(json.dumps([clearest(model, length, int(sys.argv[2]), dice) for length in LENGTHS]))
