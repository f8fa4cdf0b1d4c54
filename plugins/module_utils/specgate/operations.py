"""The operations on one host: each takes Options and returns the document.

None prints, exits, or raises for a refusal.
"""

from __future__ import annotations

from typing import Any

from . import bundle as bundles
from . import fs, gates, lost, patching, plan, restoring
from .bundle import Bundle
from .changing import settle_unfinished
from .document import Report
from .errors import Refused
from .installation import Installation
from .options import Options
from .running import diff, fill, find, holder, judge, need_interpreter, note_holder, run
from .store import Store, read_audit
from .survey import Survey, describe


def inspect(options: Options) -> dict[str, Any]:
    """Say what SGLang is installed, in which state, and which variant of the bundle fits."""

    def body(report: Report) -> None:
        found, held = find(options)
        bundle = bundles.load(options.bundle) if options.bundle is not None else None
        survey = Survey(found, held)
        try:
            variant = None
            if bundle is not None:
                report.bundle = describe(bundle, None)
                variant, notes = plan.choose(bundle, found, survey.pristine_of)
                found.notes += notes
                survey = Survey(found, held, variant)
                report.bundle = describe(bundle, variant)
            else:
                report.bundle = survey.bundle_in_use()
                lost.remember(survey, options)
            patched = [view.path for view in survey.views.values() if view.state == "patched"]
            others = [path for path in found.changed_files() if path not in patched]
            if others:
                shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
                found.notes.append(f"differs from RECORD: {shown}")
            said = f"SGLang {found.version} ({found.kind}) in {found.root} is {survey.state}"
            fits = (
                f"; variant {variant.id} of {bundle.name} {bundle.version} fits" if bundle and variant else ""
            )
            report.end("passed", said + fits)
        finally:
            fill(report, found, survey)
            note_holder(report, held)

    return run("inspect", options, body, audit=False)


def status(options: Options) -> dict[str, Any]:
    """Say what the store knows: the bundle in use, since when, by whom, drift, an unfinished journal."""

    def body(report: Report) -> None:
        found, held = find(options)
        survey = Survey(found, held)
        forgotten = lost.remember(survey, options)
        fill(report, found, survey)
        note_holder(report, held)
        report.bundle = used = survey.bundle_in_use()
        if survey.journal is not None:
            journal = survey.journal
            report.end(
                "passed",
                f"unfinished {journal['operation']} by {journal['actor']} of {journal['started']}",
                "run apply or rollback: either settles it first",
            )
        elif forgotten is not None:
            report.end("passed", forgotten.summary, forgotten.remedy)
            return
        elif used is None:
            report.end("passed", f"SGLang {found.version}: nothing is applied")
        else:
            report.end(
                "passed",
                f"{used['name']} {used['version']} on SGLang {found.version}, {survey.state}, "
                f"since {used['since']} by {used['by']}",
            )
        if survey.state == "drifted":
            report.remedy = "see the diff; apply or rollback"
            report.diff = survey.drift_diff([view for view in survey.views.values() if view.wrong]) or None

    return run("status", options, body, audit=False)


def history(options: Options) -> dict[str, Any]:
    """Return the audit log of this host, newest last, under the document's key ``history``."""

    def body(report: Report) -> None:
        report.history = read_audit(Store(options.store).audit, options.last)
        report.end("passed", f"{len(report.history)} operations")

    return run("history", options, body, audit=False)


def verify(options: Options) -> dict[str, Any]:
    """Run the static gates on the live files, against the bundle in use or the one given."""

    def body(report: Report) -> None:
        found, held = find(options)
        held.refuse_if_busy()
        survey = Survey(found, held)
        lost.remember(survey, options)
        fill(report, found, survey)
        bundle = _bundle_to_verify(options, survey)
        if bundle is None or survey.journal is not None:
            what = "an unfinished transaction" if survey.journal is not None else "no patch"
            report.end("failed", f"SGLang {found.version} has {what}", "apply a bundle first")
            report.gates = [gates.gate("source", "failed", "nothing", reason=f"there is {what}")]
            return
        variant, notes = plan.choose(bundle, found, survey.pristine_of)
        found.notes += notes
        survey = Survey(found, held, variant)
        report.bundle = describe(bundle, variant)
        fill(report, found, survey)
        need_interpreter(found, options)
        planned = patching.planned_files(variant, survey, options, found, accept_unknown=True)
        known = (survey.recorded or {}).get("known_warnings")
        verdict = gates.run(planned, bundle, found, options, staged=False, known_warnings=known)
        report.gates, report.warnings = verdict.gates, verdict.warnings
        if options.diff:
            report.diff = diff(
                (one.file.path, one.patched, survey.views[one.file.path].live) for one in planned
            )
        judge(
            report,
            verdict,
            f"{bundle.name} {bundle.version} is in place on SGLang {found.version}",
            "apply the bundle again, or roll back",
        )

    return run("verify", options, body, audit=False)


def backup(options: Options) -> dict[str, Any]:
    """Put the pristine bytes of what the bundle would change into the store, and nothing else."""

    def body(report: Report) -> None:
        if options.bundle is None:
            raise Refused("backup needs --bundle", "render one: fab bundle --out FILE")
        bundle = bundles.load(options.bundle)
        found, held = find(options)
        variant, notes = plan.choose(bundle, found, Survey(found, held).pristine_of)
        found.notes += notes
        survey = Survey(found, held, variant)
        report.bundle = describe(bundle, variant)
        fill(report, found, survey)
        survey.refuse_if_wrong()
        pristine = [
            survey.pristine_bytes(path)
            for path, view in survey.views.items()
            if view.pristine_sha256 is not None
        ]
        missing = [
            data for data in pristine if data is not None and held.store.object(fs.sha256(data)) is None
        ]
        if missing and not options.check:
            with held.lock(holder(report)):
                for data in missing:
                    held.put_object(data, options.on_step)
        kept = "would keep" if options.check else "kept"
        report.end(
            "passed",
            f"{kept} {len(missing)} pristine files; {len(pristine) - len(missing)} were in the store",
            changed=bool(missing),
        )

    return run("backup", options, body, audit=not options.check)


def apply(options: Options) -> dict[str, Any]:
    """Back up, patch, prove and commit, in one transaction over all files."""

    def body(report: Report) -> None:
        if options.bundle is None:
            raise Refused("apply needs --bundle", "render one: fab bundle --out FILE")
        bundle = bundles.load(options.bundle)
        report.bundle = describe(bundle, None)
        found, held = find(options)
        fill(report, found, Survey(found, held))
        need_interpreter(found, options)
        if options.check:
            held.refuse_if_busy()
            patching.apply(report, options, bundle, found, held)
        else:
            with held.lock(holder(report)):
                settle_unfinished(report, found, held)
                patching.apply(report, options, bundle, found, held)
                _put_times_right(report, found)

    return run("apply", options, body, audit=not options.check)


def rollback(options: Options) -> dict[str, Any]:
    """Restore the pristine bytes of every patched file, remove those that the patch made, and prove it."""

    def body(report: Report) -> None:
        found, held = find(options)
        fill(report, found, Survey(found, held))
        if options.check:
            held.refuse_if_busy()
            restoring.rollback(report, options, found, held)
        else:
            with held.lock(holder(report)):
                settle_unfinished(report, found, held)
                restoring.rollback(report, options, found, held)
                _put_times_right(report, found)

    return run("rollback", options, body, audit=not options.check)


def _put_times_right(report: Report, found: Installation) -> None:
    for file in report.files:
        fs.put_time_right(found.path(file["path"]))


def _bundle_to_verify(options: Options, survey: Survey) -> Bundle | None:
    if options.bundle is not None:
        return bundles.load(options.bundle)
    if survey.recorded is None:
        return None
    digest = survey.recorded["bundle"]["sha256"]
    held = survey.store.store.bundle(digest)
    if held is None:
        raise Refused(f"the store has lost bundle {digest[:12]}", "give the bundle with --bundle")
    return bundles.parse(held, f"bundle {digest[:12]} in the store")
