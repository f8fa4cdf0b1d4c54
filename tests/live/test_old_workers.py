"""The threshold in the workers of SGLang up to 0.5.13, which know no CPU: real servers all the same.

Scheduler, workers, models and KV cache are SGLang's own; `cpu_kernels` stands in for the kernels. CUDA graphs and
streams are not exercised: `pytest -m gpu` does that.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from controller import matrix
from controller.render import render
from tests import wheels
from tests.live.conftest import RANKS
from tests.live.servers import Request, Steps, patch

pytestmark = pytest.mark.live
KERNELS = Path(__file__).parent / "cpu_kernels"
# one version of each generation; the environment of a neighbour will do for its dependencies
ENVIRONMENTS = {"0.5.9": "0.5.9", "0.5.11": "0.5.11", "0.5.12.post1": "0.5.11", "0.5.13.post1": "0.5.11"}
THRESHOLD = 2


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def environment(version, sglang):
    return sglang(ENVIRONMENTS[version])


@pytest.fixture(scope="module")
def patched(version, tmp_path_factory):
    root = tmp_path_factory.mktemp("package") / version
    with zipfile.ZipFile(wheels.wheel(version)) as packed:
        packed.extractall(root)
    patch(root, render())
    return root


@pytest.fixture(scope="module")
def server(version, start, speculation):
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PYTHONPATH", str(KERNELS))
        environ.setenv("SGLANG_ENABLE_SPEC_V2", "1")
        yield start(
            *speculation,
            "--disable-cuda-graph",
            "--max-running-requests=16",
            "--max-total-tokens=20000",
            "--chunked-prefill-size=32",
            f"--speculative-disable-batch-threshold={THRESHOLD}",
            ranks=RANKS[version],
        )


def test_it_obeys_the_threshold_and_changes_no_token(
    version, server, prompts, generated, same_tokens, draft_steps, request
):
    two = [Request(prompt, 20) for prompt in prompts[:THRESHOLD]]
    with Steps(server) as steps:
        answers = server.generate(two)
    assert steps.plain == steps.switches == 0
    assert 0 < steps.speculative < 19 * THRESHOLD

    # down: the draft's KV cache has no holes, so that it is accepted as if it had never paused
    long, others = Request(prompts[0], 90), [Request(prompt, 40) for prompt in prompts[1:4]]
    with Steps(server) as steps:
        answers += server.generate([long, *others])
    assert steps.plain >= 35 and steps.switches >= 2
    expected = draft_steps(long, 40)
    assert abs(steps.speculative - expected) <= 4, f"{steps.speculative} steps, not {expected}"

    # up and down, in the middle of requests
    coming = [
        Request(prompt, count) for prompt, count in zip(prompts, (120, 80, 50, 40, 30, 20), strict=False)
    ]
    with Steps(server) as steps:
        answers += server.generate_in_turn(coming, 0.2)
    assert steps.plain and steps.speculative and steps.switches >= 2
    for asked, answer in zip([*two, long, *others, *coming], answers, strict=True):
        same_tokens(asked, answer)
    # requests under a grammar, which end one after the other
    ruled = generated["grammar"]
    with Steps(server) as steps:
        answers = server.generate(Request(tuple(one["prompt"]), 120, one["regex"]) for one in ruled)
    assert steps.plain and steps.speculative and steps.switches
    assert [answer["text"] for answer in answers] == [one["text"] for one in ruled]

    name = request.node.nodeid.split("[")[0]
    where = f"{name} (TP {RANKS[version]}; {os.uname().machine}, PyTorch in place of kernels)"
    matrix.record("live-cpu", version, render(), True, where)
