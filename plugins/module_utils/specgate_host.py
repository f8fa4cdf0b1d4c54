"""What the host itself can do: free space, interpreter, GPUs, units of SGLang. Reads only."""

from __future__ import annotations

import platform
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

FOLDER = Path("/etc/systemd/system")
RUNNING = ("active", "activating", "reloading")


def describe(store: str) -> dict[str, Any]:
    """Return what preflight shows beside the installation; what cannot be found out is None or empty."""
    return {
        "python": platform.python_version(),
        "store_free_mib": _free_mib(store),
        "gpus": _gpus(),
        "units": units(),
    }


def _free_mib(path: str) -> int | None:
    """Return the free MiB for the folder, or for the nearest one above it that exists."""
    wanted = Path(path)
    folder = next((folder for folder in (wanted, *wanted.parents) if folder.is_dir()), wanted)
    try:
        return shutil.disk_usage(folder).free // 2**20
    except OSError:
        return None


def _gpus() -> list[dict[str, Any]]:
    """Return name and memory (MiB) of each GPU, as nvidia-smi prints them."""
    rows = _lines("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
    cells = [[cell.strip() for cell in row.split(",")] for row in rows]
    return [
        {"name": row[0], "memory_mib": int(row[1]), "free_mib": int(row[2])}
        for row in cells
        if len(row) == 3 and row[1].isdigit() and row[2].isdigit()
    ]


def units() -> list[dict[str, Any]]:
    """Return name, state, start (seconds since the epoch) and text of each service called sglang…"""
    # systemd forgets a unit that is stopped, and a pattern finds only what it remembers
    written = [path.name for path in FOLDER.glob("sglang*.service") if not path.name.endswith("@.service")]
    properties = "--property=Id,ActiveState,ExecMainStartTimestamp"
    text = "\n".join(
        _lines("systemctl", "show", "sglang*.service", *written, properties, "--timestamp=us+utc")
    )
    found: dict[str, dict[str, Any]] = {}
    for block in text.split("\n\n"):
        said = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in said:
            found[said["Id"]] = {
                "name": said["Id"],
                "state": said["ActiveState"],
                "started": _seconds(said["ExecMainStartTimestamp"]),
                "text": _text(FOLDER / said["Id"]),
            }
    return list(found.values())


def units_after(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the units, each with whether it is ``outdated``: it began before the files became what they are.

    It serves the old code then, whoever changed the files: this run, or one cut off before its restart.
    """
    root = Path((document.get("installation") or {}).get("root") or "/")
    paths = [root / one["path"] for one in document["files"]]
    newest = max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)
    return [{**unit, "outdated": unit["state"] in RUNNING and unit["started"] < newest} for unit in units()]


def _seconds(timestamp: str) -> float:
    """Return systemd's ``Tue 2026-12-01 12:48:18.123456 UTC`` as seconds since the epoch; 0 for never."""
    try:
        when = datetime.strptime(timestamp, "%a %Y-%m-%d %H:%M:%S.%f UTC")
        return when.replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return 0.0


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _lines(*command: str) -> list[str]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=15, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
