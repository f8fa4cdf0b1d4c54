"""What the host itself can do: free space, interpreter, GPUs, units of SGLang. Reads only."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any, Dict, List, Optional


def describe(store: str) -> Dict[str, Any]:
    """Return what preflight shows beside the installation; what cannot be found out is None or empty."""
    return {
        "python": platform.python_version(),
        "store_free_mib": _free_mib(store),
        "gpus": _gpus(),
        "units": _units(),
    }


def _free_mib(path: str) -> Optional[int]:
    """Return the free MiB for the folder, or for the nearest one above it that exists."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        return shutil.disk_usage(path).free // 2**20
    except OSError:
        return None


def _gpus() -> List[Dict[str, Any]]:
    """Return name and memory (MiB) of each GPU, as nvidia-smi prints them."""
    rows = _lines("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
    cells = [[cell.strip() for cell in row.split(",")] for row in rows]
    return [
        {"name": row[0], "memory_mib": int(row[1]), "free_mib": int(row[2])}
        for row in cells if len(row) == 3 and row[1].isdigit() and row[2].isdigit()
    ]


def _units() -> List[Dict[str, str]]:
    """Return name and state of each unit whose name begins with sglang."""
    rows = _lines("systemctl", "list-units", "--all", "--plain", "--no-legend", "--type=service", "sglang*")
    cells = [row.split() for row in rows]
    return [{"name": row[0], "state": row[2]} for row in cells if len(row) >= 4]


def _lines(*command: str) -> List[str]:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
