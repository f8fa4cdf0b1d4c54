"""What systemd knows of a unit and of processes. Reads only."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "MainPID",
    "InvocationID",
    "Result",
    "ExecMainStatus",
    "NRestarts",
)
_STARTING = ("condition", "start-pre", "start")


@dataclass(frozen=True)
class Unit:
    """A unit as ``systemctl show`` describes it."""

    name: str
    loaded: bool
    active: str
    sub: str
    pid: int
    invocation: str
    result: str
    status: str

    @property
    def dead(self) -> bool:
        """Say whether the server has died, or was never started."""
        if self.active in ("failed", "inactive", "deactivating") or self.sub == "auto-restart":
            return True
        # while ExecStartPost= runs, the unit stays "activating" even when its main process has died
        return self.pid == 0 and self.sub not in _STARTING

    @property
    def state(self) -> str:
        """Return the state for people: ``failed (exit-code, status 1)``."""
        more = f"{self.result}, status {self.status}" if self.result not in ("", "success") else self.sub
        return f"{self.active} ({more})"


def show(name: str) -> Unit | None:
    """Return a unit, or None when systemd gives no answer."""
    command = ["systemctl", "show", name, *(f"--property={one}" for one in _PROPERTIES)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    said = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return Unit(
        name=name,
        loaded=said.get("LoadState") == "loaded",
        active=said.get("ActiveState", ""),
        sub=said.get("SubState", ""),
        pid=int(said.get("MainPID") or 0),
        invocation=said.get("InvocationID", ""),
        result=said.get("Result", ""),
        status=said.get("ExecMainStatus", ""),
    )


def unit_of(pid: int) -> str | None:
    """Return the service that a process belongs to, from its control group; None for no service."""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return None
    found = re.findall(r"/([^/\n]+\.service)(?:/|$)", text, re.MULTILINE)
    return found[-1] if found else None


def start_time(pid: int) -> str | None:
    """Return a token that tells this process from a later one with the same number; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def describe(pid: int) -> str:
    """Return who a process is: number, command, user and unit."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        command = b" ".join(raw[:3]).decode("utf-8", "replace")
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({command[:60]}), user {_user(uid)}, {unit_of(pid) or 'no unit'}"


def _user(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)
