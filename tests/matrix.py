"""The matrix of what was proven for which SGLang version: one small file a proof (docs/matrix.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "matrix"
PROOFS = ("applies", "imports", "live-cpu", "live-gpu")


def write(version: str, proof: str, variant: str, bundle: str, evidence: list[str], test: str) -> Path:
    """Write that ``test`` proved ``proof`` for an SGLang version with this bundle; return the file.

    Raises ValueError for a proof that the matrix has no column for. A failing test writes nothing: the file of
    the bundle before stays, and its digest says that it is old.
    """
    if proof not in PROOFS:
        raise ValueError(f"no proof {proof!r} in the matrix; known are {', '.join(PROOFS)}")
    path = RESULTS / version / f"{proof}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "sglang": version,
        "proof": proof,
        "variant": variant,
        "bundle": bundle,
        "evidence": evidence,
        "test": test,
    }
    path.write_text(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
