"""The static gates: each proves one thing, and says what it proved.

They take the same files twice: once staged, beside the live package, and once live.
"""

from __future__ import annotations

import base64
import contextlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from . import fs, interpreter
from .anchors import marker_lines
from .bundle import Bundle
from .document import count
from .installation import Installation
from .interpreter import Answer, Asking, NoAnswer
from .options import Options
from .plan import Planned

Gate = dict[str, Any]
LAST_LINES = 12


@dataclass
class Verdict:
    """The gates in order, the warnings that are new, and those that the pristine package gives as well."""

    gates: list[Gate] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    known_warnings: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Say whether no gate failed."""
        return all(gate["outcome"] in ("passed", "skipped") for gate in self.gates)

    @property
    def first_failed(self) -> Gate | None:
        """Return the gate that failed, or None."""
        return next((gate for gate in self.gates if gate["outcome"] == "failed"), None)


def gate(
    name: str,
    outcome: str,
    proved: str,
    evidence: Sequence[str] = (),
    reason: str | None = None,
    seconds: float = 0.0,
) -> Gate:
    """Return one entry of the document's key ``gates``."""
    return {
        "gate": name,
        "outcome": outcome,
        "proved": proved,
        "evidence": list(evidence),
        "reason": reason,
        "seconds": round(seconds, 3),
    }


def run(
    planned: Sequence[Planned],
    bundle: Bundle,
    installation: Installation,
    options: Options,
    staged: bool,
    known_warnings: list[str] | None = None,
) -> Verdict:
    """Run source, compile, import and flag in order; nothing is imported when one of the first two failed.

    Staged, the patched bytes are judged as if they lay in place; live, what lies there. ``known_warnings``
    are those of an earlier pristine import; without them the pristine package is imported as well.
    """
    verdict = Verdict()

    def read(one: Planned) -> bytes | None:
        return one.patched if staged else fs.read(installation.path(one.file.path))

    for run_one in (_source, _compile):
        began = time.monotonic()
        found = run_one(planned, installation, read, verdict)
        found["seconds"] = round(time.monotonic() - began, 3)
        verdict.gates.append(found)
    if options.no_import or not verdict.passed:
        reason = "--no-import" if options.no_import else "a gate before it failed"
        verdict.gates += [
            gate("import", "skipped", "nothing", reason=reason),
            gate("flag", "skipped", "nothing", reason=reason),
        ]
        return verdict
    verdict.gates += _import(planned, bundle, installation, options, staged, known_warnings, verdict)
    return verdict


def _source(
    planned: Sequence[Planned],
    installation: Installation,
    read: Callable[[Planned], bytes | None],
    verdict: Verdict,
) -> Gate:
    """Prove that each file has exactly the planned bytes, and that each marker stands where it should."""
    evidence: list[str] = []
    counts: list[str] = []
    version = installation.version.split("+")[0]
    for one in planned:
        file, data = one.file, read(one)
        if data is None:
            return gate("source", "failed", "nothing", evidence, f"{file.path} does not exist")
        found = marker_lines(data, file.markers) if file.markers else []
        evidence += found
        expected = (
            file.marker_lines.get(version) if isinstance(file.marker_lines, dict) else file.marker_lines
        )
        wrong = None
        if isinstance(expected, list) and found != expected:
            wrong = f"{file.path}: the marker lines are not those expected: {expected}"
        elif isinstance(expected, int) and len(found) != expected:
            wrong = f"{file.path}: {len(found)} lines hold a marker, not {expected}"
        elif file.markers and not found:
            wrong = f"{file.path}: no line holds a marker"
        elif data != one.patched:
            wrong = f"{file.path} is not what the patch makes of it (sha256 {fs.sha256(data)[:12]}…)"
        if wrong:
            return gate("source", "failed", "nothing", evidence, wrong)
        if file.markers:
            counts.append(f"{len(found)} in {file.path}")
    marked = "; marker lines: " + ", ".join(counts) if counts else ""
    return gate("source", "passed", f"{count(len(planned), 'file')} as planned{marked}", evidence)


def _compile(
    planned: Sequence[Planned],
    installation: Installation,
    read: Callable[[Planned], bytes | None],
    verdict: Verdict,
) -> Gate:
    """Prove that each file is Python; warnings that its pristine form does not give are new."""
    evidence: list[str] = []
    for one in planned:
        data = read(one)
        if data is None:
            continue
        try:
            said = _compiled(data, one.file.path)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 0
            around = data.decode("utf-8", "replace").splitlines()
            shown = [f"{n}:{around[n - 1]}" for n in range(max(1, line - 3), min(len(around), line + 1) + 1)]
            reason = f"{one.file.path} line {line}: {getattr(error, 'msg', error)}"
            return gate("compile", "failed", "nothing", shown if line else [], reason)
        known = _compiled(one.pristine, one.file.path) if one.pristine is not None else []
        verdict.warnings += [text for text in said if text not in known]
        evidence.append(f"{one.file.path} compiles")
    return gate("compile", "passed", f"{count(len(evidence), 'file')} compiled", evidence)


def _compiled(data: bytes, path: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile(data, path, "exec", dont_inherit=True)
    return [f"{path}: {one.category.__name__}: {one.message}" for one in caught]


def _import(
    planned: Sequence[Planned],
    bundle: Bundle,
    installation: Installation,
    options: Options,
    staged: bool,
    known_warnings: list[str] | None,
    verdict: Verdict,
) -> tuple[Gate, Gate]:
    """Import every module of the patch in one fresh interpreter, and try the flag in the same one."""
    began = time.monotonic()
    python = installation.interpreter
    assert python is not None

    def ask(patched: bool) -> Asking:
        request = {
            "do": "import",
            "flag": bundle.flag if patched else None,
            "modules": _modules(planned, installation, staged, patched),
        }
        root = str(installation.root)
        return Asking(python.path, request, options.env, options.import_timeout, package=root)

    pristine_broken = None
    with contextlib.ExitStack() as running:
        asked = running.enter_context(ask(True))
        if known_warnings is None:
            known_warnings = []
            try:
                pristine = running.enter_context(ask(False)).answer()
                known_warnings = _warnings(pristine)
                pristine_broken = _broken(pristine.value["modules"])
            except NoAnswer as error:
                pristine_broken = error.reason
        answer: Answer | NoAnswer
        try:
            answer = asked.answer()
        except NoAnswer as error:
            answer = error
    verdict.known_warnings = sorted(set(known_warnings))
    skipped = gate("flag", "skipped", "nothing", reason="the import gate failed")
    reason: str | None
    if isinstance(answer, NoAnswer):
        evidence, reason, last = [], f"{python.path} {answer.reason}", answer.lines
    else:
        modules = answer.value["modules"]
        evidence = [f"{one['name'].rpartition('.')[2]} OK" for one in modules if not one["error"]]
        reason = _broken(modules) or (None if staged else _not_the_file(planned, installation, modules))
        last = next((one["error"] for one in modules if one["error"]), []) if reason else []
    seconds = time.monotonic() - began
    if reason is not None or isinstance(answer, NoAnswer):
        if pristine_broken is not None:
            reason = f"{reason}; the pristine package does not import either, so the environment is at fault"
        return gate("import", "failed", "nothing", evidence + last[-LAST_LINES:], reason, seconds), skipped
    verdict.warnings += [text for text in _warnings(answer) if text not in verdict.known_warnings]
    where = "as if in place, before anything changed" if staged else "from the patched files themselves"
    proved = f"Python {python.version} imports {len(modules)} modules {where}"
    return gate("import", "passed", proved, evidence, None, seconds), _flag(bundle, answer.value["flag"])


def _modules(
    planned: Sequence[Planned], installation: Installation, staged: bool, patched: bool
) -> list[dict[str, str]]:
    """Return what inside.py must import; with ``staged`` bytes where the live file is not the one wanted."""
    modules = []
    for one in planned:
        data = one.patched if patched else one.pristine
        if data is None:
            continue
        module = {"name": one.file.module, "file": str(installation.path(one.file.path))}
        if staged or not patched:
            module["staged"] = base64.b64encode(data).decode("ascii")
        modules.append(module)
    return modules


def _broken(modules: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why an import failed, from the last line of its traceback."""
    return next((f"{one['name']}: {one['error'][-1]}" for one in modules if one["error"]), None)


def _not_the_file(
    planned: Sequence[Planned], installation: Installation, modules: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return why what was imported is not the file that was patched."""
    for one, found in zip(planned, modules):
        path = installation.path(one.file.path)
        if found["file"] != str(path.resolve()):
            return f"{one.file.module} was imported from {found['file']}, not from {path}"
        if found["sha256"] != fs.sha256(one.patched):
            return f"{path} does not hold the patched bytes"
        if found["stale"]:
            return f"{one.file.module} was loaded from stale bytecode beside {path}; remove its __pycache__"
    return None


def _warnings(answer: Answer) -> list[str]:
    """Return what an import warned of: Python warnings, and lines on standard error that speak of one."""
    said = list(answer.value["warnings"])
    said += [interpreter.normal(line) for line in answer.stderr if "warning" in line.lower()]
    return list(dict.fromkeys(said))


def _flag(bundle: Bundle, lines: Sequence[Mapping[str, Any]]) -> Gate:
    if bundle.flag is None:
        return gate("flag", "skipped", "nothing", reason="the bundle names no flag")
    evidence = [one["line"] for one in lines]
    wrong = next((one["line"] for one in lines if not one["ok"]), None)
    if wrong is not None:
        return gate("flag", "failed", "nothing", evidence, wrong)
    return gate("flag", "passed", f"{bundle.flag['option']} is parsed as it should be", evidence)
