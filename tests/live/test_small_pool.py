"""The same with pages of 16 tokens and a KV cache too small for all, so that some have to start again."""

from __future__ import annotations

import time

import pytest

from tests.live.servers import Request, Steps

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def server(start, speculation):
    return start(
        *speculation,
        "--page-size=16",
        "--max-running-requests=8",
        "--max-total-tokens=960",
        "--disable-radix-cache",
        "--chunked-prefill-size=32",
        "--speculative-disable-batch-threshold=2",
    )


def test_retracted_requests_get_the_same_tokens(server, prompts, same_tokens):
    counts = (160, 160, 150, 150, 140, 140, 130, 60)
    requests = [Request(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    with Steps(server) as steps:
        answers = server.generate(requests)
    assert steps.plain and steps.speculative
    assert "Retract requests" in server.words() or sum(
        a["meta_info"].get("num_retractions", 0) for a in answers
    )
    for request, answer in zip(requests, answers, strict=True):
        same_tokens(request, answer)
    time.sleep(3)
    assert server.process.poll() is None and "leak" not in server.words()
