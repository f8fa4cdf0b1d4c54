"""The SGLang environments are what they claim to be: the wheel's own files. tests/patch imports them."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import sglang_env


@pytest.mark.parametrize("version", sglang_env.versions())
def test_files_are_those_of_the_wheel(version: str, sglang: Callable[[str], Path]) -> None:
    packages = next(sglang(version).glob("lib/python3.*/site-packages"))
    with (packages / f"sglang-{version}.dist-info/RECORD").open(newline="") as record:
        rows = [(path, digest) for path, digest, _ in csv.reader(record) if digest.startswith("sha256=")]
    assert len(rows) > 1000
    for path, digest in rows:
        actual = hashlib.sha256((packages / path).read_bytes()).digest()
        assert base64.urlsafe_b64encode(actual).decode().rstrip("=") == digest.removeprefix("sha256="), path
