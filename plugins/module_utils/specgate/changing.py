"""Changes the files of an installation for an operation, proves the change, and commits or undoes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from . import fs
from .document import Report, audit_line, explain, remedy_for
from .errors import Interrupted, Refused
from .fs import Attributes
from .installation import Installation
from .running import NOTHING_CHANGED
from .store import InstallationStore, append_audit
from .survey import Survey
from .transaction import Change, Transaction, settle

MARGIN = 1 << 20


def preflight(changes: Sequence[Change], found: Installation, held: InstallationStore) -> None:
    """Refuse what would run out of space, or may not write, before anything changes. Raises Refused."""
    for change in changes:
        target = found.path(change.path)
        if target.is_symlink():
            raise Refused(
                f"{target} is a symbolic link to {target.readlink()}; the patch would cut it",
                "install SGLang with copied files (uv: --link-mode copy)",
            )
        if not os.access(target.parent, os.W_OK | os.X_OK):
            read_only = os.statvfs(target.parent).f_flag & os.ST_RDONLY
            raise Refused(
                f"{target.parent} " + ("is on a read-only file system" if read_only else "cannot be written"),
                "remount it read-write" if read_only else "run as root, or as the owner of the package",
            )
    package = sum(len(change.after or b"") for change in changes)
    kept = sum(len(change.before or b"") for change in changes)
    for folder, size in ((found.root, package), (held.folder, 2 * kept)):
        free = fs.free_bytes(Path(folder))
        if changes and free < size + MARGIN:
            raise Refused(
                f"{folder} has {free >> 10} KiB free, {(size + MARGIN) >> 10} KiB are needed",
                "free some space (df -h), then try again",
            )


def attributes(survey: Survey, path: str) -> Attributes:
    """Return what the file at ``path`` must keep: its own, else the remembered, else its folder's owner."""
    target = survey.installation.path(path)
    if target.exists():
        return Attributes.of(target)
    remembered = survey.views[path].remembered
    if remembered:
        return Attributes(remembered["mode"], remembered["uid"], remembered["gid"])
    folder = Attributes.of(target.parent)
    return Attributes(0o644, folder.uid, folder.gid)


def carry_out(
    report: Report,
    found: Installation,
    held: InstallationStore,
    changes: Sequence[Change],
    proven: Callable[[], bool],
    state: dict[str, Any] | None,
) -> bool:
    """Make the changes, prove them, and commit ``state`` (None: nothing is applied any more).

    Whatever fails before the state stands undoes every change; whatever fails after it does not. Returns
    whether the changes stand; if not, the report says why.
    """
    options = report.options
    transaction = Transaction(held, found, changes, options.on_step)
    stop: BaseException | None = None
    proved = False
    try:
        transaction.begin(report.operation, options.actor, options.run_id, report.started)
        transaction.swap()
        proved = proven()
        if proved:
            held.commit(state, options.on_step)
    except (OSError, Interrupted, KeyboardInterrupt) as error:
        stop = error
    except BaseException:
        transaction.undo()
        raise
    if proved and held.state() == state:
        report.committed = True
        _tidy_up(report, transaction)
        return True
    why = _say(stop) if stop else report.summary
    remedy = remedy_for(stop) if isinstance(stop, OSError) else "look at why it failed, then try again"
    try:
        found.notes += transaction.undo()
    except OSError as error:
        report.end(
            "inconclusive",
            f"{why}; and it could not be undone yet: {explain(error)}. The journal is kept",
            f"{remedy_for(error)}: rollback settles it",
            changed=True,
        )
        report.exit_code = 3
        return False
    if transaction.touched:
        report.end("undone", f"{why}; every file has its old content again", remedy)
    else:
        report.end("refused", why + NOTHING_CHANGED, remedy)
    return False


def _tidy_up(report: Report, transaction: Transaction) -> None:
    """Remove the traces; what stays is harmless, since the next run finds the journal and goes on here."""
    try:
        report.options.on_step("committed")
        transaction.finish()
    except (OSError, Interrupted, KeyboardInterrupt) as error:
        report.warnings.append(f"done, but not tidied up yet, the next run does it: {_say(error)}")


def _say(error: BaseException) -> str:
    return explain(error) if isinstance(error, OSError) else f"stopped by {error or 'the operator'}"


def settle_unfinished(report: Report, found: Installation, held: InstallationStore) -> None:
    """Finish or undo what a killed run left, and say so."""
    journal = held.journal()
    if journal is None:
        held.sweep()
        return
    what = f"the {journal['operation']} that {journal['actor']} began at {journal['started']}"
    recorded = held.state() or {}
    # an apply is done once its state is written; a rollback can always be finished
    forward = journal["operation"] == "rollback" or recorded.get("run_id") == journal["run_id"]
    try:
        notes = settle(held, found, journal, "after" if forward else "before", report.options.on_step)
        if journal["operation"] == "rollback":
            held.commit(None, report.options.on_step)
        held.forget_journal(report.options.on_step)
    except OSError as error:
        raise Refused(
            f"{what} could not be settled yet: {explain(error)}; its journal is kept", remedy_for(error)
        ) from error
    notes.append(f"{what} was {'finished' if forward else 'undone'} first")
    found.notes += notes
    line = audit_line(report.document())
    line.update(operation="recover", run_id=journal["run_id"], bundle=None, files=[], changed=True)
    line["summary"] = notes[-1]
    try:
        append_audit(held.store.audit, line)
    except OSError as error:
        report.warnings.append(f"the audit log could not be written: {explain(error)}")
