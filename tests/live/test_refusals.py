"""The server's own argument checks refuse what a threshold does not work with, and say what to do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.live.servers import BACKEND, SPECULATION

pytestmark = pytest.mark.live
FLAG = "--speculative-disable-batch-threshold"
SET = f"{FLAG}=4"
# SGLang itself refuses pipeline parallelism, two-batch overlap and PD multiplexing in these releases
REFUSED = {
    "-1": ([*SPECULATION, f"{FLAG}=-1"], "must be 0"),
    "no speculation": ([SET], "needs --speculative-algorithm EAGLE or EAGLE3"),
    "ngram": ([SET, "--speculative-algorithm=NGRAM"], "not NGRAM"),
    "standalone": ([*SPECULATION, SET, "--speculative-algorithm=STANDALONE"], "not STANDALONE"),
    "topk 2": ([*SPECULATION, SET, "--speculative-eagle-topk=2"], "needs --speculative-eagle-topk 1"),
    "adaptive": ([*SPECULATION, SET, "--speculative-adaptive"], "--speculative-adaptive"),
    "rejection": (
        [*SPECULATION, SET, "--speculative-use-rejection-sampling"],
        "--speculative-use-rejection-sampling",
    ),
    "multi-layer": ([*SPECULATION, SET, "--enable-multi-layer-eagle"], "--enable-multi-layer-eagle"),
    "dp": (
        [*SPECULATION, SET, "--enable-dp-attention", "--dp-size=2", "--tp-size=2"],
        "--enable-dp-attention",
    ),
    "lora": (
        [*SPECULATION, SET, "--enable-lora", "--max-lora-rank=8", "--lora-target-modules=all"],
        "--enable-lora",
    ),
    "disaggregation": ([*SPECULATION, SET, "--disaggregation-mode=prefill"], "--disaggregation-mode"),
    "hidden states": ([*SPECULATION, SET, "--enable-return-hidden-states"], "--enable-return-hidden-states"),
}
ACCEPTED = {
    "4": [*SPECULATION, SET],
    "0": [*SPECULATION, f"{FLAG}=0"],
    "0 without speculation": [f"{FLAG}=0"],
}


@pytest.fixture(scope="module")
def verdicts(environment: Path, patched: Path, models: Path):
    """What the server says of each case."""
    named = {**{name: case for name, (case, _) in REFUSED.items()}, **ACCEPTED}
    common = [f"--model-path={models / 'target'}", "--device=cpu", *BACKEND]
    draft = f"--speculative-draft-model-path={models / 'draft'}"
    cases = [
        [*common, *case, *([draft] if any("algorithm" in one for one in case) else [])]
        for case in named.values()
    ]
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(patched), os.environ.get("PYTHONPATH")))),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [environment / "bin/python", Path(__file__).with_name("refusals.py")],
        input=json.dumps(cases),
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(named, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(verdicts, case):
    assert verdicts[case] is not None, "accepted"
    kind, text = verdicts[case]
    assert kind == "ValueError"
    assert text.startswith(FLAG)
    assert REFUSED[case][1] in text


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(verdicts, case):
    assert verdicts[case] is None
