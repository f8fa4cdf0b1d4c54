"""What a unit writes to the journal: what the server is doing now, and why it died."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX = "specgate: "  # what the engine itself prints inside a unit; never taken for the server's words
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_LAST = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:: .*)?$")
# what the other processes say when one of them has died: the cause stands in an earlier traceback
_AFTERMATH = re.compile(
    r"^(?:\w+\.)*(?:EOFError|KeyboardInterrupt|SystemExit|CancelledError|BrokenPipeError|ConnectionResetError)\b"
)


@dataclass(frozen=True)
class Entry:
    """One line of the journal; ``invocation`` is the start of the unit that it belongs to."""

    cursor: str
    message: str
    pid: int
    invocation: str


def read(unit: str, after: str | None = None, lines: int = 2000) -> list[Entry]:
    """Return a unit's last entries, oldest first; with ``after`` (a cursor) only the later ones.

    Empty when there is no journal, or none that this user may read.
    """
    command = ["journalctl", "--quiet", "--no-pager", "--output=json", f"--unit={unit}", f"--lines={lines}"]
    if after:
        command.append(f"--after-cursor={after}")
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [_entry(json.loads(line)) for line in done.stdout.splitlines() if line.startswith(b"{")]


def _entry(fields: dict[str, object]) -> Entry:
    message = fields.get("MESSAGE") or ""
    if isinstance(message, list):  # bytes that are no UTF-8, such as a progress bar
        message = bytes(message).decode("utf-8", "replace")
    return Entry(
        cursor=str(fields.get("__CURSOR", "")),
        message=str(message),
        pid=int(str(fields.get("_PID", 0))),
        invocation=str(fields.get("_SYSTEMD_INVOCATION_ID") or fields.get("INVOCATION_ID") or ""),
    )


def of_last_start(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of the newest start of the unit in which the server itself said something."""
    own = [entry.invocation for entry in entries if entry.pid != 1 and not entry.message.startswith(PREFIX)]
    return [entry for entry in entries if own and entry.invocation == own[-1]]


def words(entries: Sequence[Entry]) -> list[str]:
    """Return the server's own lines: without time stamps, systemd's lines and the engine's."""
    said = [
        entry.message.rsplit("\r", 1)[-1]
        for entry in entries
        if entry.pid != 1 and not entry.message.startswith(PREFIX)
    ]
    return [_STAMP.sub("", line).rstrip() for text in said for line in text.splitlines()]


def activity(lines: Sequence[str]) -> str | None:
    """Return what the server is doing now: its last line that says something."""
    for line in reversed(lines):
        # an indented line is source code under a warning or a traceback
        if line.strip() and not line.startswith(" "):
            return line.strip()
    return None


def cause(lines: Sequence[str], last: int = 10) -> list[str]:
    """Return why the server died: its last traceback that is no aftermath, else its last lines."""
    found = tracebacks(lines)
    causes = [one for one in found if not _AFTERMATH.match(one[-1])]
    if found:
        return (causes or found)[-1]
    return [line for line in lines if line.strip()][-last:]


def tracebacks(lines: Sequence[str]) -> list[list[str]]:
    """Return every traceback, chained ones as one, each from its first line to the exception's."""
    found: list[list[str]] = []
    block: list[str] | None = None
    chained = False
    for line in lines:
        if _TRACEBACK in line:
            if block is not None and chained:
                block.append(_TRACEBACK)
            else:
                block = [_TRACEBACK]
                found.append(block)
            chained = False
        elif line.startswith('  File "') and (block is None or not block):
            # a syntax error in the file that Python was told to run has no heading
            block = [line]
            found.append(block)
        elif block and any(line.startswith(text) for text in _CHAINED):
            block.append(line)
            chained = True
        elif block and not chained:
            if not line.strip() and not block[-1].startswith("  "):
                continue
            if line.startswith(" ") or not line.strip() or _LAST.match(line):
                block.append(line)
            else:
                block = None
    return [_trimmed(one) for one in found if len(one) > 1]


def _trimmed(block: list[str]) -> list[str]:
    """Cut what follows the exception's line: blank lines, and a chain that never came."""
    ends = [number for number, line in enumerate(block) if _LAST.match(line)]
    return block[: ends[-1] + 1] if ends else block
