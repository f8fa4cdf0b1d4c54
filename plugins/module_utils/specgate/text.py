"""A document as text for people: the failing gate with its evidence first, then one line for the rest."""

from __future__ import annotations

import textwrap
from typing import Any

WIDTH = 80
_SIGN = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip", "inconclusive": "??  "}


def render(document: dict[str, Any]) -> str:
    """Return the text that the command line prints without ``--json``."""
    lines: list[str] = []
    for gate in sorted(document["gates"], key=lambda one: one["outcome"] != "failed"):
        lines += _gate(gate)
    found = document["installation"]
    if found:
        lines.append(
            _field("sglang", f"{found['version']} ({found['kind']}), {found['state']}, {found['root']}")
        )
        for other in found["others"]:
            lines.append(_field("other", f"{other['version']} in {other['root']}"))
    if document["bundle"]:
        bundle = document["bundle"]
        variant = f", variant {bundle['variant']}" if bundle.get("variant") else ""
        lines.append(
            _field("bundle", f"{bundle['name']} {bundle['version']}{variant}, sha256 {bundle['sha256'][:12]}")
        )
    lines += [_field(one["state"], one["path"]) for one in document["files"]]
    lines += [_field("note", note) for note in (found["notes"] if found else [])]
    lines += [_field("warning", warning) for warning in document["warnings"]]
    for entry in document.get("history") or []:
        bundle = entry.get("bundle") or {}
        what = f"{entry['operation']} {entry['outcome']} by {entry['actor']}: {entry['summary']}"
        lines.append(_field(entry["started"], what + (f" [{bundle['sha256'][:12]}]" if bundle else "")))
    if document["diff"]:
        lines += ["", document["diff"].rstrip("\n"), ""]
    changed = ", changed" if document["changed"] else ""
    lines.append(_field(f"{document['outcome']}{changed}", document["summary"]))
    if document["remedy"]:
        lines.append(_field("do", document["remedy"]))
    return "\n".join(lines)


def _gate(gate: dict[str, Any]) -> list[str]:
    said = gate["reason"] if gate["reason"] else gate["proved"]
    lines = [_field(f"{_SIGN[gate['outcome']]} {gate['gate']}", said)]
    for line in gate["evidence"]:
        # lines of source and of a traceback are shown as they are
        shown = f"    {line}"
        lines.append(
            textwrap.fill(shown, WIDTH, subsequent_indent=" " * 6) if gate["gate"] == "flag" else shown
        )
    return lines


def _field(name: str, value: str) -> str:
    return textwrap.fill(
        f"{name:<14} {value}",
        WIDTH,
        subsequent_indent=" " * 15,
        break_long_words=False,
        break_on_hyphens=False,
    )
