"""The one JSON document that every operation returns (docs/engine.md, The document)."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from .errors import one_line
from .options import Options

EXIT_CODES = {"passed": 0, "failed": 1, "refused": 2, "undone": 3, "inconclusive": 4}


def now() -> str:
    """Return the time as the documents spell it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def count(number: int, noun: str) -> str:
    """Return a number with its noun, as people write it."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


@dataclass
class Report:
    """An operation's document while it is being filled."""

    operation: str
    options: Options
    outcome: str = "passed"
    changed: bool = False
    summary: str = ""
    remedy: str | None = None
    installation: dict[str, Any] | None = None
    bundle: dict[str, Any] | None = None
    files: list[dict[str, Any]] = field(default_factory=list)
    gates: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    diff: str | None = None
    history: list[dict[str, Any]] | None = None
    exit_code: int | None = None
    committed: bool = False
    started: str = field(default_factory=now)
    began: float = field(default_factory=time.monotonic)

    def end(self, outcome: str, summary: str, remedy: str | None = None, changed: bool = False) -> None:
        """Say how the operation ended."""
        self.outcome, self.summary, self.remedy, self.changed = outcome, one_line(summary), remedy, changed

    def document(self) -> dict[str, Any]:
        """Return the finished document."""
        code = EXIT_CODES[self.outcome] if self.exit_code is None else self.exit_code
        document: dict[str, Any] = {
            "specgate": 1,
            "operation": self.operation,
            "outcome": self.outcome,
            "changed": self.changed,
            "exit_code": code,
            "summary": self.summary,
            "remedy": self.remedy,
            "host": socket.gethostname(),
            "actor": self.options.actor,
            "run_id": self.options.run_id,
            "started": self.started,
            "seconds": round(time.monotonic() - self.began, 3),
            "installation": self.installation,
            "bundle": self.bundle,
            "files": self.files,
            "gates": self.gates,
            "warnings": self.warnings,
            "diff": self.diff,
        }
        if self.history is not None:
            document["history"] = self.history
        return document


def audit_line(document: dict[str, Any]) -> dict[str, Any]:
    """Return what the audit log keeps of a document: who, when, what, hashes, gates and outcome."""
    installation = document["installation"] or {}
    line = {
        key: document[key]
        for key in (
            "started",
            "seconds",
            "operation",
            "actor",
            "run_id",
            "host",
            "outcome",
            "changed",
            "summary",
        )
    }
    line.update(
        {
            "root": installation.get("root"),
            "version": installation.get("version"),
            "bundle": document["bundle"],
            "files": [
                {key: one[key] for key in ("path", "sha256_before", "sha256_after")}
                for one in document["files"]
            ],
            "gates": {one["gate"]: one["outcome"] for one in document["gates"]},
            "notes": installation.get("notes", []) + document["warnings"],
        }
    )
    return line


def explain(error: OSError) -> str:
    """Return an operating system's error as one line that names the file."""
    name = error.filename if isinstance(error.filename, str) else None
    if isinstance(error.filename, bytes):
        name = error.filename.decode("utf-8", "replace")
    return (error.strerror or str(error)) + (f": {name}" if name else "")


def remedy_for(error: OSError) -> str:
    """Return what an operator can do about an operating system's error."""
    return {
        errno.ENOSPC: "free some space (df -h), then try again",
        errno.EDQUOT: "free some space within the quota, then try again",
        errno.EROFS: "the file system is read-only: remount it read-write, or patch where it is built",
        errno.EACCES: "run as root, or as the owner of the package and the store",
        errno.EPERM: "run as root, or as the owner; lsattr shows whether the file is immutable",
        errno.EIO: "the disk reports errors: look at dmesg before anything else",
    }.get(error.errno or 0, "look at the message, put it right, then try again")
