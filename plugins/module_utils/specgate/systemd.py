"""What systemd knows of a unit and of processes. Reads only."""

from __future__ import annotations

import re
import signal
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
    "ExecMainCode",
    "ExecMainStatus",
    "NRestarts",
)
_STARTING = ("condition", "start-pre", "start")
_EXITED = "1"  # CLD_EXITED of waitid(2), as ExecMainCode= has it; other endings were signals


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
    code: str
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
        """Return the state for people: ``failed (exit status 1)``."""
        return f"{self.active} ({self.sub if self.result in ('', 'success') else self.ending or self.result})"

    @property
    def ending(self) -> str | None:
        """Return how its last main process ended, and where to look on; None while it runs."""
        if self.pid or self.code in ("", "0") or not self.status.isdigit():
            return None
        if self.code == _EXITED:
            return f"exit status {self.status}"
        number = int(self.status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        # only a systemd with control groups version 2 knows that it was the kernel, for want of memory
        if self.result == "oom-kill" or (number == signal.SIGKILL and self.result != "timeout"):
            sure = (
                "for want of memory" if self.result == "oom-kill" else "as the kernel does for want of memory"
            )
            return f"killed by {name}, {sure}: see journalctl -k -g 'out of memory', free -h, MemoryMax= of the unit"
        return f"killed by {name} ({self.result})"


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
        code=said.get("ExecMainCode", ""),
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
