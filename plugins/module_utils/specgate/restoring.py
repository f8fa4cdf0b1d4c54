"""Takes the patch off an installation, and proves that every file is pristine again."""

from __future__ import annotations

from collections.abc import Sequence

from . import bundle as bundles
from . import gates, lost, plan
from .changing import attributes, carry_out, preflight
from .document import Report, count
from .errors import Refused
from .installation import Installation
from .options import Options
from .running import diff, fill
from .store import InstallationStore
from .survey import Survey
from .transaction import Change


def rollback(report: Report, options: Options, found: Installation, held: InstallationStore) -> None:
    survey = Survey(found, held)
    if options.check and survey.journal is not None:
        raise Refused(f"an unfinished {survey.journal['operation']} comes first", "run rollback for real")
    report.bundle = survey.bundle_in_use()
    if survey.recorded is None:
        forgotten = lost.remember(survey, options)
        fill(report, found, survey)
        if forgotten is not None and not forgotten.restorable:
            views = [survey.views[path] for path in forgotten.paths]
            raise Refused(forgotten.summary, forgotten.remedy, survey.drift_diff(views))
        _remember_lost(survey, options, found)
    fill(report, found, survey)
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
        changes.append(Change(path, view.live, data, attributes(survey, path)))
        if view.state == "drifted" and view.live is not None and not options.check:
            kept = held.save_drift(view.live, options.on_step)
            found.notes.append(f"{path} had been changed since it was patched; that is kept in {kept}")
    if options.check or options.diff:
        report.diff = diff((change.path, change.before, change.after) for change in changes)
    if not changes and survey.recorded is None:
        report.end("passed", f"SGLang {found.version}: nothing was patched")
        return
    preflight(changes, found, held)
    if options.check:
        report.end(
            "passed",
            f"would restore {count(len(changes), 'file')} of SGLang {found.version}",
            changed=bool(changes),
        )
        return

    paths = list(survey.views)

    def proven() -> bool:
        proof = _equals_pristine(Survey(found, held), paths)
        report.gates = [proof]
        if proof["outcome"] != "passed":
            report.end("failed", proof["reason"])
        return proof["outcome"] == "passed"

    if carry_out(report, found, held, changes, proven, None):
        report.end(
            "passed",
            f"SGLang {found.version} is pristine again: {report.gates[0]['proved']}",
            changed=bool(changes),
        )
    after = Survey(found, held)
    for path in paths:
        after.views.setdefault(path, after.look(path, survey.views[path].module))
    fill(report, found, after)


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
            f"{path} is gone" if view.sha256 is None else f"{path} equals {oracle}: {view.sha256[:16]}…"
        )
    proved = f"{count(len(evidence) - gone, 'file')} equal to {oracle}" + (
        f", {gone} created gone" if gone else ""
    )
    return gates.gate("source", "passed", proved, evidence)
