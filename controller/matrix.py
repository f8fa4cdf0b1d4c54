"""What test runs have proven for which SGLang version, and where (docs/matrix.md)."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROOFS = Path(__file__).resolve().parent.parent / "tests" / "proofs"
LEVELS = {
    "applies": "applies to the wheel from PyPI; source and compile gates pass",
    "imports": "both modules import with the real package; the flag is parsed",
    "live-cpu": "a real server on a CPU crosses the threshold both ways",
    "live-gpu": "a real server on a GPU crosses the threshold both ways",
}


@dataclass(frozen=True)
class Row:
    """A version, the variant for it, and by level what a test run last said of that variant."""

    version: str
    variant: str
    cells: Mapping[str, str]


def record(
    level: str, version: str, bundle: Mapping[str, Any], passed: bool, where: str, proofs: Path = PROOFS
) -> None:
    """Write down what a test run found: whether ``bundle`` reached ``level`` on this SGLang ``version``.

    ``where`` names the test and the kind of machine. Raises ValueError for an unknown level, KeyError for an
    unknown version.
    """
    if level not in LEVELS:
        raise ValueError(f"{level!r} is no level; there are {', '.join(LEVELS)}")
    proofs.mkdir(parents=True, exist_ok=True)
    with (proofs / f"{level}.json").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # test processes may run side by side
        file.seek(0)
        found = json.loads(file.read() or "{}")
        found[version] = {
            "variant_sha256": _digest(_variants(bundle)[version]),
            "outcome": "passed" if passed else "failed",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "where": where,
        }
        file.truncate(0)
        file.write(json.dumps(dict(sorted(found.items(), key=lambda each: order(each[0]))), indent=1) + "\n")


def rows(bundle: Mapping[str, Any], proofs: Path = PROOFS) -> list[Row]:
    """Return a row for each version of the bundle, oldest first.

    A cell is ``-`` where no test run has spoken, and ``old`` where it spoke of another text of the variant.
    """
    said = {level: _read(proofs / f"{level}.json") for level in LEVELS}
    return [
        Row(version, variant["id"], {level: _cell(said[level].get(version), variant) for level in LEVELS})
        for version, variant in sorted(_variants(bundle).items(), key=lambda each: order(each[0]))
    ]


def order(version: str) -> tuple[tuple[int, ...], int]:
    """Return a key that puts versions in order: 0.5.9, 0.5.10, 0.5.10.post1."""
    release, _, post = version.partition(".post")
    return tuple(int(part) for part in release.split(".")), int(post or 0)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def _cell(found: Mapping[str, Any] | None, variant: Mapping[str, Any]) -> str:
    if found is None:
        return "-"
    return str(found["outcome"]) if found["variant_sha256"] == _digest(variant) else "old"


def _variants(bundle: Mapping[str, Any]) -> dict[str, Any]:
    return {version: variant for variant in bundle["variants"] for version in variant["sglang"]}


def _digest(variant: Mapping[str, Any]) -> str:
    """Return the digest of what a variant does, whatever it is called and whoever shares it."""
    text = json.dumps(variant["files"], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
