"""Are these the tokens that the target model itself would choose?

The judge is a prefill: the server is given prompt and answer, and says how likely each token was and which
one was likeliest. A prefill neither drafts nor decodes, so it does not depend on what a patch of the worker
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .serving_client import Client, NoAnswer

# Two kernels, or two batch sizes, may choose differently where the two best tokens are this close (nats): four
# units in the last place of a bfloat16 logit between 16 and 32. A wrong token is off by several times as much.
NEAR_TIE = 0.5


@dataclass(frozen=True)
class Verdict:
    """How far an answer is from greedy: the widest gap, where it is, and which tokens it is between."""

    gap: float
    position: int
    token: int
    likeliest: int

    def right(self, near_tie: float) -> bool:
        """Say whether every token was the likeliest, or as good as."""
        return self.gap <= near_tie

    def __str__(self) -> str:
        return f"token {self.position} is {self.token}, {self.likeliest} is likelier by {self.gap:.2f} nats"


def judge(client: Client, prompt: Sequence[int], tokens: Sequence[int], timeout: float) -> Verdict:
    """Return the verdict on an answer. Raises NoAnswer or Rejected when the server cannot score it."""
    said = client.generate(
        {
            "input_ids": [*prompt, *tokens],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": len(prompt) - 1,
            "top_logprobs_num": 1,
        },
        timeout,
    )
    meta = said.get("meta_info") or {}
    chosen = list(meta.get("input_token_logprobs") or [])[-len(tokens) :]
    best = list(meta.get("input_top_logprobs") or [])[-len(tokens) :]
    if [entry[1] for entry in chosen] != list(tokens) or len(best) != len(tokens):
        raise NoAnswer("the server does not score what it is given")
    worst = Verdict(0.0, 0, 0, 0)
    for position, (entry, top) in enumerate(zip(chosen, best)):
        gap = float(top[0][0]) - float(entry[0])
        if gap > worst.gap:
            worst = Verdict(gap, position, int(entry[1]), int(top[0][1]))
    return worst


def divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two answers differ, as far as both go; None when they agree."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), None)
