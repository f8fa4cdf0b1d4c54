"""The operations on one host: each takes Options and returns the document.

None prints, exits, or raises for a refusal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from . import bundle as bundles
from . import fs, gates, installation, plan
from .bundle import Bundle, Variant
from .document import Report, audit_line, explain, now, remedy_for
from .errors import Interrupted, Refused
from .fs import Attributes
from .installation import Installation
from .options import Options
from .plan import Planned
from .store import InstallationStore, Store, append_audit, read_audit
from .survey import Survey, describe, unified
from .transaction import Change, Transaction, settle

MARGIN = 1 << 20
_NOTHING_CHANGED = "; nothing was changed"


def inspect(options: Options) -> dict[str, Any]:
    """Say what SGLang is installed, in which state, and which variant of the bundle fits."""

    def body(report: Report) -> None:
        found, held = _found(options)
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
            said = f"SGLang {found.version} ({found.kind}) in {found.root} is {survey.state}"
            fits = (
                f"; variant {variant.id} of {bundle.name} {bundle.version} fits" if bundle and variant else ""
            )
            report.end("passed", said + fits)
        finally:
            _fill(report, found, survey)
            _note_holder(report, held)

    return _run("inspect", options, body, audit=False)


def status(options: Options) -> dict[str, Any]:
    """Say what the store knows: the bundle in use, since when, by whom, drift, an unfinished journal."""

    def body(report: Report) -> None:
        found, held = _found(options)
        survey = Survey(found, held)
        _fill(report, found, survey)
        _note_holder(report, held)
        report.bundle = used = survey.bundle_in_use()
        if survey.journal is not None:
            journal = survey.journal
            report.end(
                "passed",
                f"unfinished {journal['operation']} by {journal['actor']} of {journal['started']}",
                "run apply or rollback: either settles it first",
            )
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

    return _run("status", options, body, audit=False)


def history(options: Options) -> dict[str, Any]:
    """Return the audit log of this host, newest last, under the document's key ``history``."""

    def body(report: Report) -> None:
        report.history = read_audit(Store(options.store).audit, options.last)
        report.end("passed", f"{len(report.history)} operations")

    return _run("history", options, body, audit=False)


def verify(options: Options) -> dict[str, Any]:
    """Run the static gates on the live files, against the bundle in use or the one given."""

    def body(report: Report) -> None:
        found, held = _found(options)
        held.refuse_if_busy()
        survey = Survey(found, held)
        _fill(report, found, survey)
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
        _fill(report, found, survey)
        _need_interpreter(found, options)
        planned = _plan(variant, survey, options, found, accept_unknown=True)
        known = (survey.recorded or {}).get("known_warnings")
        verdict = gates.run(planned, bundle, found, options, staged=False, known_warnings=known)
        report.gates, report.warnings = verdict.gates, verdict.warnings
        if options.diff:
            report.diff = _diff(
                (one.file.path, one.patched, survey.views[one.file.path].live) for one in planned
            )
        _judge(
            report,
            verdict,
            f"{bundle.name} {bundle.version} is in place on SGLang {found.version}",
            "apply the bundle again, or roll back",
        )

    return _run("verify", options, body, audit=False)


def backup(options: Options) -> dict[str, Any]:
    """Put the pristine bytes of what the bundle would change into the store, and nothing else."""

    def body(report: Report) -> None:
        if options.bundle is None:
            raise Refused("backup needs --bundle", "render one: fab bundle --out FILE")
        bundle = bundles.load(options.bundle)
        found, held = _found(options)
        variant, notes = plan.choose(bundle, found, Survey(found, held).pristine_of)
        found.notes += notes
        survey = Survey(found, held, variant)
        report.bundle = describe(bundle, variant)
        _fill(report, found, survey)
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
            with held.lock(_holder(report)):
                for data in missing:
                    held.put_object(data, options.on_step)
        kept = "would keep" if options.check else "kept"
        report.end(
            "passed",
            f"{kept} {len(missing)} pristine files; {len(pristine) - len(missing)} were in the store",
            changed=bool(missing),
        )

    return _run("backup", options, body, audit=not options.check)


def apply(options: Options) -> dict[str, Any]:
    """Back up, patch, prove and commit, in one transaction over all files."""

    def body(report: Report) -> None:
        if options.bundle is None:
            raise Refused("apply needs --bundle", "render one: fab bundle --out FILE")
        bundle = bundles.load(options.bundle)
        report.bundle = describe(bundle, None)
        found, held = _found(options)
        report.installation = found.describe("unfinished")
        _need_interpreter(found, options)
        if options.check:
            held.refuse_if_busy()
            _apply(report, options, bundle, found, held)
        else:
            with held.lock(_holder(report)):
                _settle_unfinished(report, found, held)
                _apply(report, options, bundle, found, held)

    return _run("apply", options, body, audit=not options.check)


def rollback(options: Options) -> dict[str, Any]:
    """Restore the pristine bytes of every patched file, remove those that the patch made, and prove it."""

    def body(report: Report) -> None:
        found, held = _found(options)
        report.installation = found.describe("unfinished")
        if options.check:
            held.refuse_if_busy()
            _rollback(report, options, found, held)
        else:
            with held.lock(_holder(report)):
                _settle_unfinished(report, found, held)
                _rollback(report, options, found, held)

    return _run("rollback", options, body, audit=not options.check)


def _run(operation: str, options: Options, body: Callable[[Report], None], audit: bool) -> dict[str, Any]:
    """Run one operation and turn whatever stops it into its document."""
    report = Report(operation, options)
    try:
        body(report)
    except Refused as refusal:
        report.end("refused", refusal.summary, refusal.remedy)
        report.diff = refusal.diff or report.diff
    except OSError as error:
        report.end("refused", explain(error) + _NOTHING_CHANGED, remedy_for(error))
    except (Interrupted, KeyboardInterrupt) as stop:
        report.end("refused", f"stopped by {stop or 'the operator'}{_NOTHING_CHANGED}", "run it again")
    document = report.document()
    if audit:
        _audit(options, document)
    return document


def _audit(options: Options, document: dict[str, Any]) -> None:
    try:
        append_audit(Store(options.store).audit, audit_line(document))
    except OSError as error:
        document["warnings"].append(f"the audit log could not be written: {explain(error)}")


def _found(options: Options) -> tuple[Installation, InstallationStore]:
    found = installation.find(options)
    return found, Store(options.store).installation(found.id)


def _holder(report: Report) -> dict[str, Any]:
    return {
        "operation": report.operation,
        "actor": report.options.actor,
        "run_id": report.options.run_id,
        "since": report.started,
        "pid": os.getpid(),
    }


def _note_holder(report: Report, held: InstallationStore) -> None:
    holder = held.holder()
    if holder and report.installation:
        report.installation["notes"].append(
            f"{holder.get('operation', 'an operation')} by {holder.get('actor', '?')} is at work since "
            f"{holder.get('since', '?')}"
        )


def _fill(report: Report, found: Installation, survey: Survey) -> None:
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


def _need_interpreter(found: Installation, options: Options) -> None:
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


def _plan(
    variant: Variant, survey: Survey, options: Options, found: Installation, accept_unknown: bool
) -> list[Planned]:
    """Plan the patch from pristine bytes. Raises Refused when a file has none, or has the patch already."""
    pristine: dict[str, bytes | None] = {}
    for file in variant.files:
        view = survey.views[file.path]
        pristine[file.path] = None
        if file.create is not None:
            if view.pristine_sha256 is not None:
                raise Refused(
                    f"{file.path} is part of SGLang {found.version} itself, the patch cannot create it",
                    "use a bundle that fits this SGLang",
                )
            if not found.path(file.path).parent.is_dir():
                raise Refused(
                    f"{file.path} cannot be created: SGLang {found.version} has no such folder",
                    "use a bundle that fits this SGLang",
                )
            continue
        if view.pristine_sha256 is None:
            raise Refused(
                f"{file.path} is not part of this SGLang, says {found.oracle}",
                "use a bundle that fits this SGLang",
            )
        data = survey.pristine_bytes(file.path)
        if data is None:
            raise Refused(
                f"the pristine bytes of {file.path} are neither in place nor in the store",
                f"install SGLang {found.version} again, then apply",
            )
        expected = file.marker_lines if isinstance(file.marker_lines, int) else 1
        if file.markers and len(gates.marker_lines(data, file.markers)) >= max(expected, 1):
            raise Refused(
                f"the pristine {file.path} holds the patch's markers already: SGLang was built with it",
                "nothing to patch, or a bundle with other markers",
            )
        pristine[file.path] = data
    planned, accepted = plan.make(variant, pristine, accept_unknown)
    if not accept_unknown or options.accept_unknown_code:
        found.notes += accepted
    return planned


def _apply(
    report: Report, options: Options, bundle: Bundle, found: Installation, held: InstallationStore
) -> None:
    survey = Survey(found, held)
    if options.check and survey.journal is not None:
        raise Refused(
            f"an unfinished {survey.journal['operation']} comes first", "run rollback, or apply for real"
        )
    variant, notes = plan.choose(bundle, found, survey.pristine_of)
    found.notes += notes
    survey = Survey(found, held, variant)
    report.bundle = describe(bundle, variant)
    _fill(report, found, survey)
    survey.refuse_if_wrong()
    planned = _plan(variant, survey, options, found, options.accept_unknown_code)
    wanted: dict[str, bytes | None] = {one.file.path: one.patched for one in planned}
    for path, view in survey.views.items():
        if path not in wanted:
            # the bundle before this one changed it, this one does not
            wanted[path] = survey.pristine_bytes(path)
            if wanted[path] is None and view.pristine_sha256 is not None:
                raise Refused(
                    f"the store has lost the pristine bytes of {path}",
                    f"install SGLang {found.version} again",
                )
    changes = [
        Change(path, survey.views[path].live, data, _attributes(survey, path))
        for path, data in wanted.items()
        if survey.views[path].live != data
    ]
    if options.check or options.diff:
        report.diff = _diff((change.path, change.before, change.after) for change in changes)
    what = f"{bundle.name} {bundle.version} ({variant.id}) on SGLang {found.version}"
    recorded = survey.recorded or {}
    if not changes and recorded.get("bundle", {}).get("sha256") == bundle.sha256:
        verdict = gates.run(planned, bundle, found, options, False, recorded.get("known_warnings"))
        report.gates, report.warnings = verdict.gates, verdict.warnings
        _judge(
            report, verdict, f"{what} was in place already", "look at the gate; rollback takes the patch off"
        )
        return
    verdict = gates.run(planned, bundle, found, options, staged=True)
    report.gates, report.warnings = verdict.gates, verdict.warnings
    if not verdict.passed:
        _judge(report, verdict, "", "put the bundle or the environment right; nothing was changed")
        return
    _preflight(changes, found, held)
    if options.check:
        report.end("passed", f"would put {what}", changed=bool(changes))
        return
    state = {
        "specgate_state": 1,
        "root": str(found.root),
        "version": found.version,
        "bundle": report.bundle,
        "since": now(),
        "actor": options.actor,
        "run_id": options.run_id,
        "known_warnings": verdict.known_warnings,
        "files": [
            {
                "path": one.file.path,
                "module": one.file.module,
                "pristine_sha256": None if one.pristine is None else fs.sha256(one.pristine),
                "patched_sha256": fs.sha256(one.patched),
                **_kept(_attributes(survey, one.file.path)),
            }
            for one in planned
        ],
    }
    for one in planned:
        if one.pristine is not None:
            held.put_object(one.pristine, options.on_step)
    held.put_bundle(bundle.sha256, bundle.document, options.on_step)

    def proven() -> bool:
        live = gates.run(planned, bundle, found, options, False, verdict.known_warnings)
        report.gates = live.gates
        report.warnings += [text for text in live.warnings if text not in report.warnings]
        if not live.passed:
            _judge(report, live, "", "")
            return False
        fs.write_json(held.state_path, state, options.on_step)
        return True

    if _change(report, found, held, changes, proven):
        report.end("passed", f"put {what}", changed=bool(changes))
    _fill(report, found, Survey(found, held, variant))


def _rollback(report: Report, options: Options, found: Installation, held: InstallationStore) -> None:
    survey = Survey(found, held)
    if options.check and survey.journal is not None:
        raise Refused(f"an unfinished {survey.journal['operation']} comes first", "run rollback for real")
    report.bundle = survey.bundle_in_use()
    if survey.recorded is None:
        _remember_lost(survey, options, found)
    _fill(report, found, survey)
    changes: list[Change] = []
    for path, view in survey.views.items():
        if view.sha256 == view.pristine_sha256:
            continue
        data = survey.pristine_bytes(path)
        if data is None and view.pristine_sha256 is not None:
            raise Refused(
                f"the pristine bytes of {path} for SGLang {found.version} are not in the store",
                f"pip install --force-reinstall --no-deps sglang=={found.version}",
                survey.drift_diff([view]),
            )
        changes.append(Change(path, view.live, data, _attributes(survey, path)))
        if view.state == "drifted" and view.live is not None and not options.check:
            kept = held.save_drift(view.live, options.on_step)
            found.notes.append(f"{path} had been changed since it was patched; that is kept in {kept}")
    if options.check or options.diff:
        report.diff = _diff((change.path, change.before, change.after) for change in changes)
    if not changes and survey.recorded is None:
        report.end("passed", f"SGLang {found.version}: nothing was patched")
        return
    _preflight(changes, found, held)
    if options.check:
        report.end(
            "passed", f"would restore {len(changes)} files of SGLang {found.version}", changed=bool(changes)
        )
        return

    paths = list(survey.views)

    def proven() -> bool:
        proof = _equals_pristine(Survey(found, held), paths)
        report.gates = [proof]
        if proof["outcome"] != "passed":
            report.end("failed", proof["reason"])
            return False
        held.state_path.unlink(missing_ok=True)
        fs.sync_folder(held.folder)
        options.on_step("state removed")
        return True

    if _change(report, found, held, changes, proven):
        report.end(
            "passed",
            f"SGLang {found.version} is pristine again: {report.gates[0]['proved']}",
            changed=bool(changes),
        )
    after = Survey(found, held)
    for path in paths:
        after.views.setdefault(path, after.look(path, survey.views[path].module))
    _fill(report, found, after)


def _remember_lost(survey: Survey, options: Options, found: Installation) -> None:
    """Find patched files when the store has no state: those of the bundle given, and those it can restore."""
    if options.bundle is not None:
        variant = plan.choose(bundles.load(options.bundle), found, survey.pristine_of)[0]
        for file in variant.files:
            survey.views[file.path] = survey.look(file.path, file.module)
    for path, digest in found.record.items():
        if path.startswith("sglang/") and survey.store.store.object_path(digest).exists():
            survey.views.setdefault(path, survey.look(path, path[: -len(".py")].replace("/", ".")))


def _equals_pristine(after: Survey, paths: Sequence[str]) -> gates.Gate:
    """Prove that the files are what RECORD (or the commit) says they are."""
    evidence: list[str] = []
    gone = 0
    oracle = after.installation.oracle
    for path in paths:
        view = after.look(path, "")
        if view.sha256 != view.pristine_sha256:
            return gates.gate("source", "failed", "nothing", evidence, f"{path} does not equal {oracle}")
        gone += view.live is None
        evidence.append(
            f"{path} " + (f"sha256 {view.sha256} equals {oracle}" if view.live is not None else "is gone")
        )
    proved = f"{len(evidence) - gone} files equal {oracle}" + (f", {gone} created are gone" if gone else "")
    return gates.gate("source", "passed", proved, evidence)


def _change(
    report: Report,
    found: Installation,
    held: InstallationStore,
    changes: Sequence[Change],
    proven: Callable[[], bool],
) -> bool:
    """Make the changes, prove them, and commit; undo them when anything fails. Say whether they stand."""
    options = report.options
    transaction = Transaction(held, found, changes, options.on_step)
    stop: BaseException | None = None
    why = ""
    try:
        transaction.begin(report.operation, options.actor, options.run_id, report.started)
        transaction.swap()
        if proven():
            options.on_step("committed")
            transaction.finish()
            return True
        why = report.summary
    except OSError as error:
        stop, why = error, explain(error)
    except (Interrupted, KeyboardInterrupt) as error:
        stop, why = error, f"stopped by {error or 'the operator'}"
    except BaseException:
        transaction.undo()
        raise
    remedy = (
        remedy_for(stop) if isinstance(stop, OSError) else "look at the gate and its evidence, then try again"
    )
    try:
        found.notes += transaction.undo()
    except OSError as error:
        report.end(
            "undone",
            f"{why}; and it could not be undone yet: {explain(error)}. The journal is kept",
            f"{remedy_for(error)}: rollback settles it",
            changed=True,
        )
        report.outcome, report.exit_code = "inconclusive", 3
        return False
    if transaction.touched:
        report.end("undone", f"{why}; every file has its old content again", remedy)
    else:
        report.end("refused", why + _NOTHING_CHANGED, remedy)
    return False


def _settle_unfinished(report: Report, found: Installation, held: InstallationStore) -> None:
    """Finish or undo what a killed run left, and say so."""
    journal = held.journal()
    if journal is None:
        held.sweep()
        return
    recorded = held.state() or {}
    # an apply is done once its state is written; a rollback can always be finished
    forward = journal["operation"] == "rollback" or recorded.get("run_id") == journal["run_id"]
    notes = settle(held, found, journal, "after" if forward else "before", report.options.on_step)
    if journal["operation"] == "rollback" and recorded:
        held.state_path.unlink(missing_ok=True)
    done = "finished" if forward else "undone"
    notes.append(
        f"the {journal['operation']} that {journal['actor']} began at {journal['started']} was {done} first"
    )
    found.notes += notes
    line = {
        "started": now(),
        "operation": "recover",
        "actor": report.options.actor,
        "run_id": journal["run_id"],
        "outcome": "passed",
        "changed": True,
        "summary": notes[-1],
        "root": str(found.root),
    }
    append_audit(held.store.audit, line)


def _attributes(survey: Survey, path: str) -> Attributes:
    """Return what the file at ``path`` must keep: its own, else the remembered, else its folder's owner."""
    target = survey.installation.path(path)
    if target.exists():
        return Attributes.of(target)
    remembered = survey.views[path].remembered
    if remembered:
        return Attributes(remembered["mode"], remembered["uid"], remembered["gid"])
    folder = Attributes.of(target.parent)
    return Attributes(0o644, folder.uid, folder.gid)


def _kept(attributes: Attributes) -> dict[str, int]:
    return {"mode": attributes.mode, "uid": attributes.uid, "gid": attributes.gid}


def _preflight(changes: Sequence[Change], found: Installation, held: InstallationStore) -> None:
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


def _diff(changes: Any) -> str | None:
    return "".join(unified(path, before, after) for path, before, after in changes) or None


def _judge(report: Report, verdict: gates.Verdict, passed: str, remedy: str) -> None:
    """End the report as the gates say."""
    failed = verdict.first_failed
    if failed is None:
        report.end("passed", passed)
    else:
        report.end("failed", f"{failed['gate']} gate: {failed['reason']}", remedy)
