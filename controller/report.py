"""What people see: a line for each host as it ends, failures with their evidence, one table for the fleet.

Also what programs see: with ``--json``, one object on standard output and nothing else there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .connect import HostError
from .fleet import Host
from .matrix import LEVELS, Row
from .units import short

Document = dict[str, Any]
Column = tuple[str, Callable[[Document], Text | str]]

STYLES = {"passed": "green", "skipped": "yellow", "inconclusive": "yellow", "old": "yellow", "-": ""}
SERVER_STYLES = {"active": "green", "failed": "red"}
WIDTH = 80

out = Console(highlight=False, width=None if Console().is_terminal else WIDTH)
progress = Console(stderr=True, highlight=False, width=None if Console(stderr=True).is_terminal else WIDTH)


def document(
    operation: str, host: Host, summary: str, outcome: str = "passed", remedy: str | None = None, **more: Any
) -> Document:
    """Return a document of what the engine had no part in, with the engine's keys."""
    return {
        "specgate": 1,
        "operation": operation,
        "outcome": outcome,
        "changed": False,
        "exit_code": 0 if outcome == "passed" else 1,
        "summary": summary,
        "remedy": remedy,
        "host": host.name,
        "seconds": None,
        "installation": None,
        "bundle": None,
        "files": [],
        "gates": [],
        "warnings": [],
        "diff": None,
        **more,
    }


def no_answer(operation: str, host: Host, error: HostError) -> Document:
    """Return the document of a host that could not give its own."""
    return document(operation, host, error.summary, error.outcome, error.remedy)


def fail(document: Document, summary: str, evidence: Sequence[str] = (), remedy: str | None = None) -> None:
    """Turn a document into that of a failure that the engine could not see."""
    document.update(outcome="failed", exit_code=1, summary=summary, remedy=remedy or document["remedy"])
    document["evidence"] = [*document.get("evidence", []), *evidence]


def judged(document: Document) -> Document:
    """Fail a host's status when the host is not well."""
    state = (document["installation"] or {}).get("state")
    dead = [unit for unit, state in document["units"].items() if state == "failed"]
    if document["exit_code"] == 0 and state in ("drifted", "unfinished"):
        fail(document, document["summary"])
    if dead:
        fail(document, f"{', '.join(dead)} failed", remedy=f"fab logs --hosts {document['host']}")
    return document


@contextlib.contextmanager
def at_work(
    operation: str, hosts: Sequence[Host]
) -> Iterator[Callable[[Host, Mapping[str, Document], int], None]]:
    """Show on a terminal which hosts are at work; yields what prints that one has ended."""
    waiting = [host.name for host in hosts]

    def shown() -> Text:
        names = ", ".join(waiting)
        return Text(f"{operation}: waiting for {names if len(names) < 50 else f'{len(waiting)} hosts'}")

    with progress.status(shown()) as status:

        def ended(host: Host, documents: Mapping[str, Document], left: int) -> None:
            waiting.remove(host.name)
            status.update(shown())
            more = f"  ({left} more at work)" if left else ""
            for name, document in documents.items():
                outcome = _outcome(document["outcome"])
                line = Text.assemble(f"{name:<14} ", outcome, f"  {_seconds(document)}{more}")
                progress.print(line, soft_wrap=True)

        yield ended


def evidence(documents: Mapping[str, Document], all_hosts: bool = False) -> None:
    """Print what the gates saw, failed hosts first and in each the failed gate first."""
    shown = sorted(documents.items(), key=lambda item: item[1]["exit_code"] == 0)
    for name, document in shown:
        if document["exit_code"] == 0 and not all_hosts and not document["warnings"]:
            continue
        _line(f"\n{name}", "bold")
        if document["exit_code"] != 0:
            _line(f"  {document['outcome']}: {document['summary']}", "red")
            if document["remedy"]:
                _line(f"  to do: {document['remedy']}")
            for line in document.get("evidence", []):
                _line(f"  {line}")
        for gate in sorted(document["gates"], key=lambda each: each["outcome"] == "passed"):
            if gate["outcome"] != "passed":
                said = gate["reason"] or gate["proved"]
                _line(f"  {gate['gate']} {gate['outcome']}: {said}", STYLES.get(gate["outcome"], "red"))
            for line in gate["evidence"]:
                _line(f"  {line}")
        for warning in document["warnings"]:
            _line(f"  warning: {warning}", "yellow")
        for note in (document["installation"] or {}).get("notes", []):
            _line(f"  note: {note}")


def diffs(documents: Mapping[str, Document]) -> None:
    """Print each source diff once, under the hosts that share it."""
    groups: dict[str, list[str]] = {}
    for name, document in documents.items():
        if document["diff"]:
            groups.setdefault(document["diff"], []).append(name)
    for diff, names in groups.items():
        _line(f"\n{', '.join(names)}", "bold")
        for line in diff.splitlines():
            added, removed = line.startswith("+"), line.startswith("-")
            _line(line, "green" if added else "red" if removed else "")


def fleet(documents: Mapping[str, Document], columns: Sequence[Column]) -> None:
    """Print the table: a row for each host."""
    table = _table()
    table.add_column("host", no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("said", "servers"))
    shown = _short_names(documents)
    for name, document in documents.items():
        table.add_row(Text(shown[name]), *(_text(value(document)) for _, value in columns))
    out.print()
    out.print(table)


def history(documents: Mapping[str, Document]) -> None:
    """Print the hosts' audit logs as one, oldest first."""
    table = _table()
    for heading in ("when", "host", "what", "", "who", "bundle"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "who")
    entries = [
        (entry, name) for name, document in documents.items() for entry in document.get("history") or []
    ]
    names = _short_names(documents)
    for entry, name in sorted(entries, key=lambda each: str(each[0].get("started"))):
        bundle = entry.get("bundle") or {}
        cells = (_when(str(entry.get("started"))), names[name], entry.get("operation"), entry.get("actor"))
        when, host, what, who = (Text(str(cell)) for cell in cells)
        digest = Text(str(bundle.get("sha256") or "-")[:8])
        table.add_row(when, host, what, _outcome(str(entry.get("outcome"))), who, digest)
    out.print(table)


def lines(documents: Mapping[str, Document]) -> None:
    """Print each host's lines as they are."""
    for name, document in documents.items():
        if document.get("lines"):
            _line(f"\n{name}", "bold")
            for line in document["lines"]:
                _line(line)


def matrix(rows: Sequence[Row]) -> None:
    """Print what was proven for each version."""
    table = _table()
    for heading in ("SGLang", "variant", *LEVELS):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.version, row.variant, *(_outcome(cell) for cell in row.cells.values()))
    out.print(table)


def as_json(operation: str, documents: Mapping[str, Document]) -> None:
    """Print all documents as one JSON object."""
    failed = [name for name, document in documents.items() if document["exit_code"] != 0]
    said = {"specgate": 1, "operation": operation, "failed": failed, "hosts": dict(documents)}
    print(json.dumps(said, ensure_ascii=False, indent=1))


def outcome(document: Document) -> Text:
    """Column: how the operation ended."""
    return _outcome(document["outcome"])


def said(document: Document) -> str:
    """Column: the summary."""
    return str(document["summary"])


def sglang(document: Document) -> str:
    """Column: SGLang's version."""
    return str((document["installation"] or {}).get("version") or "-")


def state(document: Document) -> Text:
    """Column: pristine, patched, drifted or unfinished; why nobody knows."""
    if document["installation"] is None:
        return _outcome(document["outcome"])
    value = str(document["installation"].get("state") or "-")
    return Text(value, "red" if value in ("drifted", "unfinished") else "")


def variant(document: Document) -> Text | str:
    """Column: the variant that fits, or how the search for one ended."""
    found = (document["bundle"] or {}).get("variant")
    return str(found) if found and document["exit_code"] == 0 else _outcome(document["outcome"])


def version(document: Document) -> str:
    """Column: the patch's version."""
    return str((document["bundle"] or {}).get("version") or "-")


def free(document: Document) -> str:
    """Column: what is free where the store is."""
    mib = document.get("free_mib")
    return "-" if mib is None else f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib} MiB"


def gpus(document: Document) -> str:
    """Column: GPUs by kind, and the least free memory of each kind."""
    kinds: dict[str, list[int]] = {}
    for name, mib in document.get("gpus") or []:
        kinds.setdefault(name.removeprefix("NVIDIA "), []).append(mib)
    rows = (f"{len(mibs)} {name}, {min(mibs) // 1024} GiB" for name, mibs in kinds.items())
    return "\n".join(rows) or "-"


def changed(document: Document) -> str:
    """Column: whether anything changed, or would."""
    return "yes" if document["changed"] else "no"


def since(document: Document) -> str:
    """Column: since when the patch is in place, UTC, to the minute."""
    return _when(str((document["bundle"] or {}).get("since") or "-"))[:11]


def servers(document: Document) -> Text:
    """Column: the servers by their states, a line for each state, those that are well last."""
    states: dict[str, list[str]] = {}
    for unit, state in sorted((document.get("units") or {}).items()):
        shown = "old code" if unit in document["outdated"] else state
        states.setdefault(shown, []).append(short(unit))
    found = Text()
    for state in sorted(states, key=lambda each: (each == "active", each)):
        found.append("\n" if found else "").append(state, SERVER_STYLES.get(state, "yellow"))
        found.append(f": {', '.join(states[state])}")
    return found or Text("-")


def restarted(document: Document) -> str:
    """Column: the servers that were restarted, or would be."""
    found = document.get("restarted") or []
    return "\n".join(map(short, found)) or "-"


def gate(name: str) -> Column:
    """Return the column of one gate."""

    def value(document: Document) -> Text | str:
        found = [each["outcome"] for each in document["gates"] if each["gate"] == name]
        return _outcome(found[0], short=True) if found else "-"

    return name, value


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name as a table shows it: without its domain, when all share one. Addresses stay whole."""
    names = list(names)
    hosts = {name: name.split(" ")[0].partition(".") for name in names}
    domains = {domain for _, _, domain in hosts.values()}
    if len(domains) > 1 or any(host.isdigit() for host, _, _ in hosts.values()):
        return {name: name for name in names}
    return {
        name: host + name.removeprefix(host + dot + domain) for name, (host, dot, domain) in hosts.items()
    }


def _outcome(value: str, short: bool = False) -> Text:
    word = {"passed": "ok", "failed": "FAILED", "skipped": "skip"}.get(value, value) if short else value
    return Text(word, STYLES.get(value, "red"))


def _when(timestamp: str) -> str:
    """Return ``2026-12-01T12:45:46Z`` as people read it in a narrow column; which year it is they know."""
    return timestamp[5:19].replace("T", " ") or timestamp


def _seconds(document: Document) -> str:
    return "-" if document["seconds"] is None else f"{document['seconds']:.1f} s"


def _text(value: Text | str) -> Text:
    return value if isinstance(value, Text) else Text(value)


def _line(line: str, style: str = "") -> None:
    out.print(Text(line, style), soft_wrap=True)
