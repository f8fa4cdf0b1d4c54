"""Which servers the GPU tests run, and with what; conftest.py says which environment variables decide."""

from __future__ import annotations

import os
import sys
from pathlib import Path

THRESHOLD = 8
PYTHON = os.environ.get("SPECGATE_GPU_PYTHON", sys.executable)
PYTHONPATH = os.environ.get("SPECGATE_GPU_PYTHONPATH", "")
TENSOR_PARALLEL = os.environ.get("SPECGATE_GPU_TP", "1")
BACKEND = os.environ.get("SPECGATE_GPU_BACKEND", "triton")

SPECULATION = [
    "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "4",
]  # fmt: skip
LIMIT = ["--speculative-disable-batch-threshold", str(THRESHOLD)]

# server: target, arguments
SERVERS: dict[str, tuple[str, list[str]]] = {
    "plain": ("noisy", []),
    "threshold": ("noisy", [*SPECULATION, *LIMIT]),
    "zero": ("noisy", [*SPECULATION, "--speculative-disable-batch-threshold", "0"]),
    "clean": ("clean", [*SPECULATION, *LIMIT]),
    "paged": ("noisy", [*SPECULATION, *LIMIT, "--page-size", "16", "--chunked-prefill-size", "64"]),
    "retracting": ("noisy", [*SPECULATION, *LIMIT]),
}

# SGLang's own switch for testing: takes requests back every so many steps, as if the KV pool were full
ENVIRONMENT = {"retracting": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}}


def common_arguments(version: str, target: Path) -> list[str]:
    """What every server of this SGLang `version` gets."""
    common = [
        "--model-path", str(target), "--skip-tokenizer-init", "--attention-backend", BACKEND,
        "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-radix-cache",
        "--max-running-requests", "24", "--cuda-graph-max-bs", "24",
        "--context-length", "2048", "--mem-fraction-static", "0.9", "--max-total-tokens", "24576", "--random-seed", "1",
    ]  # fmt: skip
    if release(version) >= (0, 5, 10):  # on by default from there; saves a minute of compilation
        common.append("--disable-piecewise-cuda-graph")
    return [*common, "--tp-size", TENSOR_PARALLEL]


def environment() -> dict[str, str]:
    """The environment of a process that is to see the user's SGLang."""
    return os.environ | ({"PYTHONPATH": PYTHONPATH} if PYTHONPATH else {})


def release(version: str) -> tuple[int, ...]:
    """(0, 5, 9) of "0.5.9" or "0.5.9.post1"."""
    return tuple(int(part) for part in version.split(".")[:3])
