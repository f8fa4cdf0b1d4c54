"""Each release: the patch applies to its real wheel, and comes off again without a trace."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import wheels
from tests.patch.conftest import VERSIONS

NINE = [
    "476:    speculative_disable_batch_threshold: int = 0  # 0 = always speculate",
    '3985:            "--speculative-disable-batch-threshold",',
    "3987:            default=ServerArgs.speculative_disable_batch_threshold,",
]


def grep(path: Path, markers: list[str]) -> list[str]:
    """Return what GNU grep prints for the lines that hold one of ``markers``."""
    patterns = [option for marker in markers for option in ("-e", marker)]
    return subprocess.run(
        ["grep", "-nF", *patterns, str(path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def removed_lines(before: Path, after: Path) -> list[str]:
    """Return the lines that GNU diff finds in ``before`` alone."""
    said = subprocess.run(["diff", str(before), str(after)], capture_output=True, text=True).stdout
    return [line for line in said.splitlines() if line.startswith("<")]


@pytest.mark.parametrize("version", VERSIONS)
def test_applies(version, tree, specgate, proves, tmp_path):
    proves("applies", version)
    root, files = tree(version), VERSIONS[version]["files"]
    edited = [file for file in files if "edits" in file]
    pristine = wheels.unpack(version, tmp_path / "pristine", {file["path"] for file in edited})

    applied = specgate("apply", root)
    assert applied["outcome"] == "passed" and applied["changed"], applied["summary"]
    gates = {gate["gate"]: gate for gate in applied["gates"]}
    assert [gates[name]["outcome"] for name in ("source", "compile", "import", "flag")] == [
        "passed", "passed", "skipped", "skipped",
    ]  # fmt: skip
    marked = [file for file in files if file.get("markers")]
    lines = [line for file in marked for line in grep(root / file["path"], file["markers"])]
    assert gates["source"]["evidence"] == lines
    assert lines
    for file in edited:
        assert removed_lines(pristine / file["path"], root / file["path"]) == []

    again = specgate("apply", root)
    assert again["outcome"] == "passed" and not again["changed"]

    rolled_back = specgate("rollback", root)
    assert rolled_back["outcome"] == "passed", rolled_back["summary"]
    for file in edited:
        assert wheels.digest((root / file["path"]).read_bytes()) == wheels.recorded(root, file["path"])
    assert not any((root / file["path"]).exists() for file in files if "create" in file)


def test_the_lines_of_0_5_9(tree, specgate):
    root = tree("0.5.9")
    specgate("apply", root)
    found = grep(
        root / "sglang/srt/server_args.py",
        ["speculative_disable_batch_threshold", "speculative-disable-batch-threshold"],
    )
    assert found == NINE


def test_every_release_from_0_5_8_to_0_5_23_has_a_variant():
    minors = {version.split(".post")[0] for version in VERSIONS}
    assert minors == {f"0.5.{minor}" for minor in range(8, 24)}
    assert len(VERSIONS) == 21
