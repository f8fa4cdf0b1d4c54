"""Changes several files as one: all of them, or none, whenever and however the engine is stopped.

The journal is on the disk before the first live file changes, and goes when the last has its content.
Whoever finds one settles it: forward when that only finishes a rollback, backward otherwise.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import fs
from .fs import Attributes
from .installation import Installation
from .store import InstallationStore


@dataclass(frozen=True)
class Change:
    """One file: its bytes before and after (None: no such file), and what its new form must keep."""

    path: str
    before: bytes | None
    after: bytes | None
    attributes: Attributes


class Transaction:
    """One journaled change of an installation's files, under its lock."""

    def __init__(
        self,
        store: InstallationStore,
        installation: Installation,
        changes: Sequence[Change],
        step: fs.StepHook,
    ) -> None:
        self.store = store
        self.installation = installation
        self.changes = changes
        self.step = step
        self.touched = False
        self.journal: dict[str, Any] = {}

    def begin(self, operation: str, actor: str, run_id: str, started: str) -> None:
        """Make sure that every old byte can be had again, and write the journal."""
        for change in self.changes:
            if change.before is not None:
                self.store.keep(change.before, self.step)
        self.journal = {
            "specgate_journal": 1,
            "operation": operation,
            "actor": actor,
            "run_id": run_id,
            "started": started,
            "version": self.installation.version,
            "files": [
                {
                    "path": change.path,
                    "before": _digest(change.before),
                    "after": _digest(change.after),
                    "mode": change.attributes.mode,
                    "uid": change.attributes.uid,
                    "gid": change.attributes.gid,
                    "xattrs": {name: value.hex() for name, value in change.attributes.xattrs.items()},
                }
                for change in self.changes
            ],
        }
        fs.write_json(self.store.journal_path, self.journal, self.step)

    def swap(self) -> None:
        """Write every new file beside its old one, and only then put them in place, one by one."""
        for change in self.changes:
            if change.after is not None:
                target = self.installation.path(change.path)
                fs.write_new(_fresh(target), change.after, change.attributes, self.step)
        for change in self.changes:
            target = self.installation.path(change.path)
            # a second link to the old file makes undoing a rename, which needs no space on a full disk
            with contextlib.suppress(OSError):
                _old(target).unlink(missing_ok=True)
                if change.before is not None:
                    os.link(target, _old(target))
            self.step(f"linked {change.path}")
            self.touched = True
            if change.after is None:
                target.unlink(missing_ok=True)
            else:
                _fresh(target).replace(target)
            self.step(f"renamed {change.path}")
            fs.sync_folder(target.parent)
            drop_bytecode(target)
            self.step(f"bytecode dropped {change.path}")

    def finish(self) -> None:
        """Remove the traces: the change is done."""
        for change in self.changes:
            _old(self.installation.path(change.path)).unlink(missing_ok=True)
            self.step(f"old link removed {change.path}")
        self.store.forget_journal(self.step)

    def undo(self) -> list[str]:
        """Give every file its old content again; return notes for people. Raises OSError."""
        notes = settle(self.store, self.installation, self.journal, "before", self.step)
        self.store.forget_journal(self.step)
        return notes


def settle(
    store: InstallationStore,
    installation: Installation,
    journal: dict[str, Any],
    side: str,
    step: fs.StepHook,
) -> list[str]:
    """Bring every file of a journal to its content ``before`` or ``after``; the journal stays.

    Files that somebody else changed in between are kept in the store's drift folder first; files that were
    installed anew are left alone. Returns notes for people. Raises OSError.
    """
    notes: list[str] = []
    for entry in journal.get("files", []):
        target = installation.path(entry["path"])
        fresh, old, wanted = _fresh(target), _old(target), entry[side]
        fresh.unlink(missing_ok=True)
        live = fs.read(target)
        now = _digest(live)
        if now != wanted:
            foreign = now is not None and now not in (entry["before"], entry["after"])
            if foreign and now == installation.pristine_sha256(entry["path"]):
                notes.append(f"{entry['path']} was installed anew meanwhile, and was left as it is")
            else:
                if foreign and live is not None:
                    kept = store.save_drift(live, step)
                    notes.append(
                        f"{entry['path']} was changed by somebody else meanwhile; that is kept in {kept}"
                    )
                _restore(store, target, wanted, entry, step)
        old.unlink(missing_ok=True)
        drop_bytecode(target)
        step(f"settled {entry['path']}")
    return notes


def _restore(
    store: InstallationStore, target: Path, wanted: str | None, entry: dict[str, Any], step: fs.StepHook
) -> None:
    old = _old(target)
    if wanted is None:
        target.unlink(missing_ok=True)
    elif _digest(fs.read(old)) == wanted:
        old.replace(target)
    else:
        data = store.any_bytes(wanted)
        if data is None:
            raise FileNotFoundError(2, "the store has lost the bytes to restore", str(target))
        xattrs = {name: bytes.fromhex(value) for name, value in entry["xattrs"].items()}
        kept = Attributes(entry["mode"], entry["uid"], entry["gid"], xattrs)
        fs.write_new(_fresh(target), data, kept, step)
        _fresh(target).replace(target)
    fs.sync_folder(target.parent)
    step(f"restored {entry['path']}")


def drop_bytecode(source: Path) -> None:
    """Remove a module's compiled forms of every Python version; a stale one would run instead of it."""
    for path in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        path.unlink(missing_ok=True)


def _digest(data: bytes | None) -> str | None:
    return None if data is None else fs.sha256(data)


def _fresh(target: Path) -> Path:
    return target.with_name(f".{target.name}.specgate-new")


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.specgate-old")
