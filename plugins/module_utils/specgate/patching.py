"""Puts a bundle's patch on an installation: plan, staged gates, transaction, live gates."""

from __future__ import annotations

from . import fs, gates, plan
from .bundle import Bundle, Variant
from .changing import attributes, carry_out, preflight
from .document import Report, now
from .errors import Refused
from .fs import Attributes
from .installation import Installation
from .options import Options
from .plan import Planned
from .running import diff, fill, judge
from .store import InstallationStore
from .survey import Survey, describe
from .transaction import Change


def apply(
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
    fill(report, found, survey)
    survey.refuse_if_wrong()
    planned = planned_files(variant, survey, options, found, options.accept_unknown_code)
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
        Change(path, survey.views[path].live, data, attributes(survey, path))
        for path, data in wanted.items()
        if survey.views[path].live != data
    ]
    if options.check or options.diff:
        report.diff = diff((change.path, change.before, change.after) for change in changes)
    what = f"{bundle.name} {bundle.version} ({variant.id}) on SGLang {found.version}"
    recorded = survey.recorded or {}
    if not changes and recorded.get("bundle", {}).get("sha256") == bundle.sha256:
        verdict = gates.run(planned, bundle, found, options, False, recorded.get("known_warnings"))
        report.gates, report.warnings = verdict.gates, verdict.warnings
        judge(
            report, verdict, f"{what} was in place already", "look at the gate; rollback takes the patch off"
        )
        return
    verdict = gates.run(planned, bundle, found, options, staged=True)
    report.gates, report.warnings = verdict.gates, verdict.warnings
    if not verdict.passed:
        judge(report, verdict, "", "put the bundle or the environment right; nothing was changed")
        return
    preflight(changes, found, held)
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
                **_kept(attributes(survey, one.file.path)),
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
            judge(report, live, "", "")
        return live.passed

    if carry_out(report, found, held, changes, proven, state):
        report.end("passed", f"put {what}", changed=bool(changes))
    fill(report, found, Survey(found, held, variant))


def planned_files(
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


def _kept(attributes: Attributes) -> dict[str, int]:
    return {"mode": attributes.mode, "uid": attributes.uid, "gid": attributes.gid}
