"""What every operation shares: finding the installation, the document, and what stops an operation."""

from __future__ import annotations

import os
from typing import Any, Callable

from . import gates, installation
from .document import Report, audit_line, explain, remedy_for
from .errors import Interrupted, Refused
from .installation import Installation
from .options import Options
from .store import InstallationStore, Store, append_audit
from .survey import Survey, unified

NOTHING_CHANGED = "; nothing was changed"


def run(operation: str, options: Options, body: Callable[[Report], None], audit: bool) -> dict[str, Any]:
    """Run one operation and turn whatever stops it into its document."""
    report = Report(operation, options)
    try:
        body(report)
    except Refused as refusal:
        report.end("refused", refusal.summary, refusal.remedy)
        report.diff = refusal.diff or report.diff
    except (OSError, Interrupted, KeyboardInterrupt) as stop:
        why = explain(stop) if isinstance(stop, OSError) else f"stopped by {stop or 'the operator'}"
        if report.committed:
            report.end("passed", f"done, then {why}", changed=True)
        else:
            remedy = remedy_for(stop) if isinstance(stop, OSError) else "run it again"
            report.end("refused", why + NOTHING_CHANGED, remedy)
    document = report.document()
    if audit:
        _audit(options, document)
    return document


def _audit(options: Options, document: dict[str, Any]) -> None:
    """Write the audit line; a refusal by a store that cannot be written needs no second complaint."""
    store = Store(options.store)
    try:
        store.ensure()
        append_audit(store.audit, audit_line(document))
    except (Refused, OSError) as error:
        if document["outcome"] != "refused":
            why = explain(error) if isinstance(error, OSError) else error.summary
            document["warnings"].append(f"the audit log could not be written: {why}")


def find(options: Options) -> tuple[Installation, InstallationStore]:
    found = installation.find(options)
    return found, Store(options.store).installation(found.id)


def holder(report: Report) -> dict[str, Any]:
    return {
        "operation": report.operation,
        "actor": report.options.actor,
        "run_id": report.options.run_id,
        "since": report.started,
        "pid": os.getpid(),
    }


def note_holder(report: Report, held: InstallationStore) -> None:
    holder = held.holder()
    if holder and report.installation:
        report.installation["notes"].append(
            f"{holder.get('operation', 'an operation')} by {holder.get('actor', '?')} is at work since "
            f"{holder.get('since', '?')}"
        )


def fill(report: Report, found: Installation, survey: Survey) -> None:
    """Put the installation and its files into the document, as they are now."""
    report.installation = found.describe(survey.state)
    before = {entry["path"]: entry["sha256_before"] for entry in report.files}
    report.files = [
        {
            "path": view.path,
            "module": view.module,
            "state": view.state,
            "pristine_sha256": view.pristine_sha256,
            "sha256_before": before.get(view.path, view.sha256),
            "sha256_after": view.sha256,
        }
        for view in survey.views.values()
    ]


def need_interpreter(found: Installation, options: Options) -> None:
    """Refuse when the import gate could not say anything about the server."""
    if options.no_import:
        return
    if found.interpreter is None:
        raise Refused(
            f"no interpreter is known for {found.root}, so the import gate cannot run",
            "give the server's interpreter with --python, or leave the gate out with --no-import",
        )
    if not found.visible:
        seen = found.interpreter.sglang
        raise Refused(
            f"{found.interpreter.path} "
            + (f"imports SGLang from {seen}" if seen else "sees no SGLang")
            + f", not from {found.root}",
            "give the interpreter that runs this server, or the right --root",
        )


def judge(report: Report, verdict: gates.Verdict, passed: str, remedy: str) -> None:
    """End the report as the gates say."""
    failed = verdict.first_failed
    if failed is None:
        report.end("passed", passed)
    else:
        report.end("failed", f"{failed['gate']} gate: {failed['reason']}", remedy)


def diff(changes: Any) -> str | None:
    return "".join(unified(path, before, after) for path, before, after in changes) or None
