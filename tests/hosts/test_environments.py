"""The SGLang environments are what they claim to be: the wheel's own files, importable without a GPU."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import sglang_env

IMPORT = "import sglang.srt.server_args, sglang.srt.speculative.eagle_worker_v2; print(sglang.__version__)"


@pytest.mark.parametrize("version", sglang_env.versions())
def test_files_are_those_of_the_wheel(version: str, sglang: Callable[[str], Path]) -> None:
    packages = next(sglang(version).glob("lib/python3.*/site-packages"))
    with (packages / f"sglang-{version}.dist-info/RECORD").open(newline="") as record:
        rows = [(path, digest) for path, digest, _ in csv.reader(record) if digest.startswith("sha256=")]
    assert len(rows) > 1000
    for path, digest in rows:
        actual = hashlib.sha256((packages / path).read_bytes()).digest()
        assert base64.urlsafe_b64encode(actual).decode().rstrip("=") == digest.removeprefix("sha256="), path


@pytest.mark.parametrize("version", sglang_env.versions())
def test_modules_import(version: str, sglang: Callable[[str], Path]) -> None:
    command = [str(sglang(version) / "bin/python"), "-B", "-W", "ignore", "-c", IMPORT]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=one_thread, cwd="/")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == version
