"""The servers of a host as systemd sees them: one unit an instance, ``sglang@NAME.service``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .connect import HostError
from .remote import Answer, Session

PATTERN = "sglang@*.service"
RUNNING = ("active", "activating", "reloading")
EXCERPT = 12  # lines of the journal that say why a server does not start

# What a server may print that nobody else should read: it logs its own arguments at the start.
_NAME = r"(?:api|admin|hf|auth)[\w-]*(?:key|token)['\"]?"
_VALUE = r"(?!None\b)(?:'[^']*'|\"[^\"]*\"|[^\s,)&]+)"
_SECRETS = (
    re.compile(rf"({_NAME}(?:\s*[=:]\s*|\s+)){_VALUE}", re.IGNORECASE),
    re.compile(r"(\bBearer\s+)\S+", re.IGNORECASE),
    re.compile(r"()\b(?:hf_|sk-)[A-Za-z0-9_-]{8,}"),
)


def short(unit: str) -> str:
    """Return a server's name, which is that of its unit without prefix and suffix."""
    return unit.removeprefix("sglang@").removesuffix(".service")


def states(here: Session) -> dict[str, str]:
    """Return the state of each of the host's servers, by unit. Raises HostError."""
    answer = here.execute(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", "--type=service", PATTERN]
    )
    if answer.code == 127 or "not been booted with systemd" in answer.stderr:
        return {}  # a container: nothing here is a unit
    if answer.code != 0:
        raise _no_answer("systemctl", answer)
    rows = (line.split() for line in answer.stdout.decode("utf-8", "replace").splitlines())
    return {row[0]: row[2] for row in rows if len(row) >= 4}


def running(here: Session) -> list[str]:
    """Return the units of the servers that run or are being started."""
    return [unit for unit, state in states(here).items() if state in RUNNING]


def restart(here: Session, units: Iterable[str]) -> dict[str, list[str]]:
    """Restart units; return those that do not serve afterwards, each with the end of its journal.

    ``systemctl restart`` returns when the server serves: readiness is part of starting.
    """
    failed = {}
    for unit in units:
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


def _no_answer(command: str, answer: Answer) -> HostError:
    first = (answer.stderr.strip().splitlines() or [f"exit code {answer.code}"])[0]
    return HostError(f"{command} gives no answer: {first}", "look at the host", "failed")
