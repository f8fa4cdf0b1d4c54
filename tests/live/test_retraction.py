"""Requests that are retracted in the middle, and prompts prefilled in chunks, get the same tokens.

A request that is retracted gives its KV cache back, and is prefilled again later with what it had generated. Pages of
one token: SGLang allocates longer ones with Triton kernels, which need a GPU (tests/gpu has pages of 16).
"""

from __future__ import annotations

import time

import pytest

from tests.live.servers import Request, Steps

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def server(start, speculation):
    with pytest.MonkeyPatch.context() as environ:
        # SGLang's own switch: requests that ignore the end of text are never let in beyond the pool's size
        environ.setenv("SGLANG_TEST_RETRACT", "1")
        environ.setenv("SGLANG_TEST_RETRACT_INTERVAL", "25")
        yield start(
            *speculation,
            "--max-running-requests=8",
            "--max-total-tokens=4000",
            "--chunked-prefill-size=32",
            "--disable-radix-cache",
            "--speculative-disable-batch-threshold=2",
        )


def test_retracted_requests_get_the_same_tokens(server, prompts, same_tokens):
    counts = (150, 120, 100, 90, 80, 70, 60, 50)
    requests = [Request(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    with Steps(server) as steps:
        answers = server.generate(requests)
    assert steps.plain and steps.speculative
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) >= 3, "nothing was retracted"
    for request, answer in zip(requests, answers, strict=True):
        same_tokens(request, answer)
    time.sleep(3)
    assert server.process.poll() is None and "leak" not in server.words()
