"""Are the port and the GPUs that a server wants really free, and if not, who holds them?"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import systemd

_LISTENING = "0A"


def port_problem(host: str, port: int) -> str | None:
    """Return why a server could not listen there, with who holds the port; None when it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # as uvicorn does: connections of the server before, still in TIME_WAIT, are no obstacle
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"{host}:{port} cannot be used: {error.strerror}"
            holders = [systemd.describe(pid) for pid in port_holders(port)]
            return f"port {port} is taken by " + (
                "; ".join(holders) or "a process that this user may not see"
            )
    return None


def port_holders(port: int) -> list[int]:
    """Return the processes that listen on a TCP port (as root: all of them)."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    return sorted(
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and inodes & set(_links(process / "fd"))
    )


def _links(folder: Path) -> Iterator[str]:
    """Return what a folder's links point to; what ends meanwhile, or belongs to someone else, is left out."""
    with contextlib.suppress(OSError):
        for link in folder.iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(link)  # noqa: PTH115  (a socket is no path)


def gpu_problem(gpus: Sequence[str], unit: str | None, server_units: str = "sglang@") -> str | None:
    """Return who still holds one of the GPUs (indices or UUIDs); None when nobody does, or no one can tell.

    Another instance's unit may share the GPU. A process of ``unit`` itself is what the server before left.
    """
    wanted = {row[1] for row in _rows("--query-gpu=index,uuid") if len(row) == 2 and set(row) & set(gpus)}
    for row in _rows("--query-compute-apps=gpu_uuid,pid"):
        if len(row) != 2 or row[0] not in wanted or not re.fullmatch(r"\d+", row[1]):
            continue
        holder = systemd.unit_of(int(row[1]))
        if holder is None or holder == unit or not holder.startswith(server_units):
            return f"GPU {row[0]} is held by {systemd.describe(int(row[1]))}"
    return None


def _rows(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
