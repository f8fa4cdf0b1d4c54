"""With threshold 0 the patched server is the unpatched one."""

from __future__ import annotations

import pytest

from tests.live.servers import Request, copy_of_package

pytestmark = pytest.mark.live


@pytest.fixture(scope="module", params=["0.5.23"])
def version(request):
    return request.param


def test_zero_is_as_without_the_patch(start, environment, speculation, prompts, same_tokens, tmp_path):
    requests = [Request(prompt, 50) for prompt in prompts[:4]]
    pristine = copy_of_package(environment, tmp_path / "pristine")
    work = {}
    for name, more, arguments in (
        ("patched", {}, ("--speculative-disable-batch-threshold=0",)),
        ("pristine", {"root": pristine}, ()),
    ):
        server = start(
            *speculation, "--max-running-requests=16", "--max-total-tokens=20000", *arguments, **more
        )
        answers = [server.generate([request])[0] for request in requests] + server.generate(requests)
        assert "batch_threshold" not in server.state()
        assert "Batch threshold" not in server.words()
        for request, answer in zip(requests * 2, answers, strict=True):
            same_tokens(request, answer)
        work[name] = [answer["meta_info"]["spec_verify_ct"] for answer in answers[:4]]
        server.stop()
    assert work["patched"] == work["pristine"]
