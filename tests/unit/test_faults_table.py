"""The table of faults names tests that exist, and every fault that is tested."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.ansible import test_faults, test_interruptions

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS.parent / "docs" / "faults.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`", TABLE)
    assert len(named) == len(re.findall(r"^\| (?!fault )[^-]", TABLE, re.MULTILINE)), "a row, a test"
    for file, name, _ in named:
        functions = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
        assert name in {one.name for one in functions if isinstance(one, ast.FunctionDef)}, (file, name)


def test_every_fault_that_is_tested_is_in_the_table() -> None:
    cases = {f"[{name}]" for name in (*test_faults.FAULTS, *test_interruptions.CASES)}
    assert cases == set(re.findall(r"\[[\w-]+\](?=`)", TABLE))
