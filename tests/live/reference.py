"""Greedy tokens of a model by transformers, which shares no code with SGLang's scheduler and kernels.

`python reference.py MODEL COUNT`, in an SGLang environment, prints as JSON

free       eight prompts of different lengths, each with the COUNT tokens that follow and their log probabilities
grammar    four prompts, each with a regular expression and the tokens that follow under it

It takes only prompts after which no token is close to a tie, so that whatever computes the same model must give
the same tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

# An unpatched SGLang 0.5.23 without speculation, on the CPU, was off from transformers by up to 0.17 in the lead
# of the best logit over the second best (1280 tokens, float32). Three times that is no tie.
CLEAR = 0.5
LENGTHS = (3, 9, 17, 24, 31, 40, 48, 57)
CANDIDATES = 24
DIGITS, LETTERS = "0123456789", "abcdef"
PAIRS = (4, 8, 15, 25)  # of a digit and a letter; a z ends them


@torch.no_grad()
def greedy(
    model: LlamaForCausalLM, prompts: torch.Tensor, allowed: list[list[int]]
) -> tuple[torch.Tensor, ...]:
    """Return tokens, leads and log probabilities, a row a prompt; all prompts are of one length.

    ``allowed`` holds for each token the ones to choose from; an empty list stands for all.
    """
    made = []
    step = model(prompts, use_cache=True)
    for choice in allowed:
        logits = step.logits[:, -1]
        if choice:
            others = torch.ones(logits.shape[-1], dtype=torch.bool)
            others[choice] = False
            logits = logits.masked_fill(others, float("-inf"))
        best = logits.topk(2)
        tokens = best.indices[:, 0]
        lead = best.values[:, 0] - best.values[:, 1]
        made.append((tokens, lead, logits.log_softmax(-1).amax(-1)))
        step = model(tokens[:, None], past_key_values=step.past_key_values, use_cache=True)
    return tuple(torch.stack(column, 1) for column in zip(*made, strict=True))


def clearest(
    model: LlamaForCausalLM, length: int, allowed: list[list[int]], dice: torch.Generator
) -> dict[str, list]:
    prompts = torch.randint(3, 510, (CANDIDATES, length), generator=dice)
    tokens, leads, logprobs = greedy(model, prompts, allowed)
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


def constrained(model: LlamaForCausalLM, folder: Path, pairs: int, dice: torch.Generator) -> dict[str, list]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    digits, letters, end = ([tokenizer.token_to_id(one) for one in text] for text in (DIGITS, LETTERS, "z"))
    found = clearest(model, 20, [digits, letters] * pairs + [end], dice)
    return {
        **found,
        "regex": f"([{DIGITS}][{LETTERS}]){{{pairs}}}z",
        "text": tokenizer.decode(found["tokens"]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    dice = torch.Generator().manual_seed(7)
    free = [clearest(model, length, [[]] * count, dice) for length in LENGTHS]
    print(json.dumps({"free": free, "grammar": [constrained(model, folder, pairs, dice) for pairs in PAIRS]}))
