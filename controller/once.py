"""Files that Ansible's workers need in one run: made by the first that asks, for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def once(folder: str, name: str, make: Callable[[], bytes]) -> Path:
    """Return the path of a file in Ansible's temporary folder, which lives as long as the run.

    Each host's task runs in a process of its own, so nothing that Python keeps would be found again. Several may
    make the file at once; it appears whole.
    """
    path = Path(folder) / name
    if not path.exists():
        # workers are forks of one process: only their number tells them apart
        fresh = path.with_name(f"{name}.{os.getpid()}")
        fresh.write_bytes(make())
        fresh.replace(path)
    return path
