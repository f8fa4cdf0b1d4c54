"""SGLang's own wheels from PyPI: downloaded once, kept in the cache, unpacked as far as a test needs."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgate" / "wheels"


def wheel(version: str) -> Path:
    """Return the wheel of an SGLang version, from the cache or from the package index.

    From 0.5.11 the wheels hold compiled parts, for one Python each; their Python source is the same, so any
    will do. Raises subprocess.CalledProcessError when pip finds none.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = sorted(CACHE.glob(f"sglang-{version}-*.whl"))
        if not found:
            _download(version)
            found = sorted(CACHE.glob(f"sglang-{version}-*.whl"))
    return found[0]


def _download(version: str) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    chosen = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12"]
    platforms = ["--platform", "manylinux_2_34_x86_64", "--platform", "any"]
    subprocess.run(
        [*pip, "download", *chosen, *platforms, "--dest", str(CACHE), f"sglang=={version}"],
        check=True,
        timeout=600,
    )


def unpack(version: str, root: Path, paths: Collection[str] | None = None) -> Path:
    """Unpack the Python source below ``sglang/srt`` (or ``paths`` alone) and the dist-info into ``root``."""
    with zipfile.ZipFile(wheel(version)) as packed:
        for name in packed.namelist():
            is_source = name.startswith("sglang/srt/") and name.endswith(".py")
            wanted = is_source if paths is None else name in paths
            if wanted or ".dist-info/" in name or name in ("sglang/__init__.py", "sglang/srt/__init__.py"):
                packed.extract(name, root)
    return root


def record(root: Path) -> Path:
    """Return the RECORD file of the SGLang below ``root``."""
    return next(root.glob("sglang-*.dist-info")) / "RECORD"


def recorded(root: Path, path: str) -> str:
    """Return the sha256 of ``path`` that RECORD gives, as it stands there (urlsafe base64, unpadded)."""
    return next(line.split(",")[1] for line in _lines(root) if line.startswith(f"{path},")).split("=", 1)[1]


def digest(data: bytes) -> str:
    """Return a sha256 in RECORD's spelling."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def declare_pristine(root: Path, paths: Iterable[str]) -> None:
    """Rewrite RECORD as if the files at ``paths`` had been released with the bytes that they have now."""
    lines = _lines(root)
    for path in paths:
        data = (root / path).read_bytes()
        entry = f"{path},sha256={digest(data)},{len(data)}"
        lines = [entry if line.startswith(f"{path},") else line for line in lines]
    record(root).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(root: Path) -> list[str]:
    return record(root).read_text(encoding="utf-8").splitlines()
