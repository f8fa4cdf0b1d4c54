"""The servers of a host as systemd sees them: one unit an instance, ``sglang@NAME.service``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from .connect import HostError
from .remote import Answer, Document, Session

PATTERN = "sglang@*.service"
RUNNING = ("active", "activating", "reloading")
EXCERPT = 12  # lines of the journal that say why a server does not start

_PROPERTIES = "Id,ActiveState,ExecMainStartTimestamp"

# What a server may print that nobody else should read: it logs its own arguments at the start.
_NAME = r"(?:api|admin|hf|auth)[\w-]*(?:key|token)['\"]?"
_VALUE = r"(?!None\b)(?:'[^']*'|\"[^\"]*\"|[^\s,)&]+)"
_SECRETS = (
    re.compile(rf"({_NAME}(?:\s*[=:]\s*|\s+)){_VALUE}", re.IGNORECASE),
    re.compile(r"(\bBearer\s+)\S+", re.IGNORECASE),
    re.compile(r"()\b(?:hf_|sk-)[A-Za-z0-9_-]{8,}"),
)


@dataclass(frozen=True)
class Unit:
    """A server's unit: its full name, its state, and when it started (seconds since the epoch)."""

    name: str
    state: str
    started: float


def short(unit: str) -> str:
    """Return a server's name, which is that of its unit without prefix and suffix."""
    return unit.removeprefix("sglang@").removesuffix(".service")


def look(here: Session) -> list[Unit]:
    """Return the servers that systemd has in memory: those that run or failed. Raises HostError."""
    answer = here.execute(["systemctl", "show", PATTERN, "--timestamp=us+utc", f"--property={_PROPERTIES}"])
    if answer.code == 127 or "not been booted with systemd" in answer.stderr:
        return []  # a container: nothing here is a unit
    if answer.code != 0:
        raise _no_answer("systemctl", answer)
    found = []
    for block in answer.stdout.decode("utf-8", "replace").split("\n\n"):
        said = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in said:
            found.append(Unit(said["Id"], said["ActiveState"], _seconds(said["ExecMainStartTimestamp"])))
    return sorted(found, key=lambda unit: unit.name)


def outdated(here: Session, units: Iterable[Unit], document: Document) -> list[str]:
    """Return the units that serve old code: they started before the document's files were written.

    That holds whoever wrote them, so a run that was cut off before its restart is made good by the next.
    """
    running = [unit for unit in units if unit.state in RUNNING]
    root = (document["installation"] or {}).get("root")
    paths = [f"{root}/{file['path']}" for file in document["files"]]
    if not running or not paths:
        return []
    # a file that the patch adds may be gone: stat complains, and tells of the others
    answer = here.execute(["stat", "-c", "%.6Y", "--", *paths], become=here.host.become)
    written = max((float(line) for line in answer.stdout.split()), default=0.0)
    return [unit.name for unit in running if unit.started < written]


def restart(here: Session, units: Iterable[str]) -> dict[str, list[str]]:
    """Restart units; return those that do not serve afterwards, each with the end of its journal.

    ``systemctl restart`` returns when the server serves: readiness is part of starting.
    """
    failed = {}
    for unit in units:
        # earlier failures do not count: at its start limit, a unit would refuse this start as well
        here.execute(["systemctl", "reset-failed", unit], become=here.host.become)
        if here.execute(["systemctl", "restart", unit], become=here.host.become).code != 0:
            failed[unit] = journal(here, [unit], EXCERPT)
    return failed


def journal(here: Session, units: Iterable[str], lines: int) -> list[str]:
    """Return the last lines of the units' journal, without secrets. Raises HostError."""
    words = ["journalctl", "-q", "--no-pager", "--output=short-iso", f"--lines={lines}"]
    words += [f"--unit={unit}" for unit in units]
    answer = here.execute(words, become=here.host.become)
    if answer.code != 0:
        raise _no_answer("journalctl", answer)
    return [redacted(line) for line in answer.stdout.decode("utf-8", "replace").splitlines()]


def redacted(line: str) -> str:
    """Return a line with stars in place of keys and tokens."""
    for secret in _SECRETS:
        line = secret.sub(r"\1***", line)
    return line


def _seconds(timestamp: str) -> float:
    """Return systemd's ``Tue 2026-12-01 12:48:18.123456 UTC`` as seconds since the epoch; 0 for never."""
    try:
        return datetime.strptime(timestamp, "%a %Y-%m-%d %H:%M:%S.%f UTC").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def _no_answer(command: str, answer: Answer) -> HostError:
    first = (answer.stderr.strip().splitlines() or [f"exit code {answer.code}"])[0]
    return HostError(f"{command} gives no answer: {first}", "look at the host", "failed")
