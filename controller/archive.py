"""Packs the engine into one zip file (``specgate.pyz``) that any Python 3.9 or later runs."""

from __future__ import annotations

import functools
import io
import zipfile
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent / "plugins" / "module_utils" / "specgate"
MAIN = "import sys\n\nfrom specgate.cli import main\n\nsys.exit(main())\n"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest date that a zip file can hold


@functools.cache
def engine(source: Path = ENGINE) -> bytes:
    """Return the engine in ``source`` as a zip file; the same source gives the same bytes.

    Raises FileNotFoundError when ``source`` holds no engine.
    """
    files = sorted(source.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no engine in {source}")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(_entry("__main__.py"), MAIN)
        for file in files:
            archive.writestr(_entry(f"specgate/{file.name}"), file.read_bytes())
    return packed.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    """Return an entry without what differs from checkout to checkout: date, mode, system."""
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3
    entry.external_attr = 0o100644 << 16
    return entry
