"""Readable rollouts: a line a host while it works, the failing gate with its evidence, a table at the end.

It is Ansible's default output, except where a result holds the engine's document.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from ansible import constants as C
from ansible.plugins.callback.default import CallbackModule as Default

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from controller.ssh_said import ssh_said

DOCUMENTATION = r"""
name: specgate
type: stdout
short_description: Readable rollouts
description:
  - Ansible's default output, except that a result of a Specgate module is shown as one line for the host, a
    failure without the dump of everything that was known, and the end as one table at 80 columns, the failing
    gate above it.
  - With C(-v) the default output comes back, documents included.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
requirements:
  - set as stdout in configuration
"""

GATES = ("source", "compile", "import", "flag", "health", "configuration", "behaviour")
HEADINGS = ("source", "comp", "import", "flag", "health", "conf", "behav")
MARKS = {"passed": "ok", "failed": "FAIL", "inconclusive": "?", "skipped": "-"}
# what begins with a line of its own, because it takes long
SLOW = ("specgate_patch", "specgate_verify", "specgate_probe", "specgate_unit")
# what succeeds without a word
SILENT = (
    "validate_argument_spec",
    "set_fact",
    "group_by",
    "specgate_lock",
    "assert",
    "include_role",
    "include_tasks",
)
# SSH says nothing when a connection ends under it
LOST = "the connection was lost; when the host is back, run this again: it settles what was left half done"
EVIDENCE_LINES = 20
WIDTH = 80


def short(name: str) -> str:
    """Return a host's name without its domain; addresses stay whole."""
    return name if name.replace(".", "").isdigit() else name.split(".")[0]


def wrapped(text: str) -> str:
    """Return text in lines of 80 columns; a diff, or lines that are shorter, stay as they are."""
    lines = text.splitlines()
    if len(lines) > 1:
        return text
    return textwrap.fill(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def table(headings: tuple[str, ...], rows: list[list[str]], width: int = WIDTH) -> list[str]:
    """Return the lines of a table that fits ``width`` columns; the first column gives way."""
    widths = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    over = sum(widths) + len(widths) - 1 - width
    widths[0] = max(min(widths[0], 6), widths[0] - max(over, 0))

    def line(cells: tuple[str, ...] | list[str]) -> str:
        fitted = [
            cell if len(cell) <= w else cell[: w - 1] + "…" for cell, w in zip(cells, widths, strict=True)
        ]
        return " ".join(cell.ljust(w) for cell, w in zip(fitted, widths, strict=True)).rstrip()

    return [line(headings), *(line(row) for row in rows)]


class Host:
    """What is known of one host at the end of the run."""

    def __init__(self) -> None:
        self.version = self.variant = self.state = ""
        self.gates: dict[str, str] = {}
        self.failed: list[dict[str, Any]] = []
        self.capabilities: dict[str, Any] = {}
        self.changed = False

    def learn(self, result: dict[str, Any]) -> None:
        """Take in a result that holds a document."""
        document = result["specgate"]
        installation, bundle = document.get("installation") or {}, document.get("bundle") or {}
        self.version = installation.get("version") or self.version
        self.state = installation.get("state") or self.state
        self.variant = bundle.get("variant") or self.variant
        self.capabilities = result.get("host") or self.capabilities
        self.changed |= bool(document.get("changed"))
        for gate in document.get("gates") or []:
            # of several servers, one that is well does not hide one that is not
            if self.gates.get(gate["gate"]) not in (MARKS["failed"], MARKS["inconclusive"]):
                self.gates[gate["gate"]] = MARKS.get(gate["outcome"], gate["outcome"])
            if gate["outcome"] in ("failed", "inconclusive"):
                self.failed.append(gate)


class CallbackModule(Default):
    """The output of ansible-playbook."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "specgate"

    def __init__(self) -> None:
        super().__init__()
        self._hosts: dict[str, Host] = {}
        self._problems: dict[str, str] = {}
        self._preflight_due = False
        self._diffs: dict[str, str] = {}
        self._unnamed: Any = None
        self._unready: dict[str, str] = {}
        self._whole_names = False

    # while it runs

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Show what preflight found; the play's name follows when it has something to show."""
        self._show_preflight()
        self._play = self._unnamed = play
        names = [host.name for host in play.get_variable_manager()._inventory.get_hosts()]
        self._whole_names = len({short(name) for name in names}) < len(names)

    def _short(self, name: str) -> str:
        return name if self._whole_names else short(name)

    def _print_task_banner(self, task: Any) -> None:
        if self._unnamed:
            super().v2_playbook_on_play_start(self._unnamed)
            self._unnamed = None
        super()._print_task_banner(task)

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        """Say that a host is at work on something that takes long."""
        super().v2_runner_on_start(host, task)
        if task.action in SLOW:
            if self._last_task_banner != task._uuid:
                self._print_task_banner(task)
            self._display.display(f"{self._short(host.name)}: at work", color=C.COLOR_VERBOSE)

    def v2_playbook_on_include(self, included_file: Any) -> None:
        """Which file holds the tasks is for -v."""
        if self._display.verbosity:
            super().v2_playbook_on_include(included_file)

    def v2_runner_on_ok(self, result: Any) -> None:
        """Show a document as one line; say nothing of bookkeeping that went well."""
        document = result.result.get("specgate")
        why = (result.result.get("ansible_facts") or {}).get("sglang_facts_problem")
        if why:
            self._unready[result.host.name] = why
        if self._display.verbosity:
            if document:
                self._learn(result)
            super().v2_runner_on_ok(result)
        elif document:
            self._learn(result)
            # what preflight found is in its table
            if document["operation"] != "inspect":
                self._line(
                    result,
                    document["summary"],
                    C.COLOR_CHANGED if result.result.get("changed") else C.COLOR_OK,
                )
            for entry in document.get("history") or []:
                said = ("started", "operation", "outcome", "actor", "summary")
                self._display.display("  " + " ".join(str(entry[key]) for key in said))
            self._handle_warnings_and_exception(result)
        elif result.task.action.rpartition(".")[2] not in SILENT:
            super().v2_runner_on_ok(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Show the reason, and the evidence of the gate that failed."""
        if result.result.get("specgate"):
            self._learn(result)
        items = [one for one in result.result.get("results") or [] if one.get("failed")]
        if not ignore_errors:
            # of a loop, what its items said, not that some failed
            said = [str(one.get("msg", "failed")).strip() for one in items or [result.result]]
            self._problems[result.host.name] = "; ".join(said)
        if self._display.verbosity or not result.result.get("msg"):
            super().v2_runner_on_failed(result, ignore_errors)
        elif not items:
            self._failure(result)

    def _failure(self, result: Any, item: str = "") -> None:
        result.result.pop("exception", None)
        self._handle_warnings_and_exception(result)
        self._line(result, f"{item}FAILED: {result.result.get('msg', 'no message')}", C.COLOR_ERROR)
        for gate in (result.result.get("specgate") or {}).get("gates") or []:
            if gate["outcome"] in ("failed", "inconclusive"):
                self._evidence(gate)
        for stream in ("stderr", "stdout"):
            for line in str(result.result.get(stream) or "").splitlines()[-EVIDENCE_LINES:]:
                self._display.display(f"    {line}", color=C.COLOR_ERROR)

    def v2_runner_item_on_ok(self, result: Any) -> None:
        """Show a document as one line."""
        document = result.result.get("specgate")
        if document:
            self._learn(result)
        if document and not self._display.verbosity:
            self._line(result, f"{self._get_item_label(result.result)}: {document['summary']}", C.COLOR_OK)
        else:
            super().v2_runner_item_on_ok(result)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        """Show the reason, and the evidence of the gate that failed."""
        if result.result.get("specgate"):
            self._learn(result)
        if self._display.verbosity:
            super().v2_runner_item_on_failed(result)
            return
        if result.result.get("unreachable"):
            return  # told once, when the loop has ended
        self._failure(result, f"{self._get_item_label(result.result)}: ")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Show why in one line; of a loop, what was said of the item."""
        items = [one for one in result.result.get("results") or [] if one.get("unreachable")]
        why = ssh_said(str((items[-1] if items else result.result).get("msg") or "unreachable"), LOST)
        if not result.task.ignore_unreachable:
            self._problems[result.host.name] = why
        if self._display.verbosity:
            super().v2_runner_on_unreachable(result)
            return
        self._line(result, f"UNREACHABLE: {why}", C.COLOR_UNREACHABLE)

    def v2_on_file_diff(self, result: Any) -> None:
        """Show a diff once, and for the other hosts say that theirs is the same."""
        if self._display.verbosity:
            super().v2_on_file_diff(result)
            return
        items = result.result.get("results", [result.result]) if result.task.loop else [result.result]
        text = "".join(
            self._get_diff(item["diff"]) for item in items if item.get("diff") and item.get("changed")
        )
        if text:
            name = self._short(result.host.name)
            first = self._diffs.setdefault(text, name)
            self._line(
                result,
                f"the diff is that of {first}" if first != name else f"the diff:\n{text.rstrip()}",
                C.COLOR_OK,
            )

    def _learn(self, result: Any) -> None:
        document = result.result["specgate"]
        # a host is shown as preflight found it, once
        self._preflight_due |= document["operation"] == "inspect" and result.host.name not in self._hosts
        self._hosts.setdefault(result.host.name, Host()).learn(result.result)

    def _line(self, result: Any, text: str, color: str) -> None:
        if self._last_task_banner != result.task._uuid:
            self._print_task_banner(result.task)
        self._display.display(wrapped(f"{self._short(result.host.name)}: {text}"), color=color)

    def _evidence(self, gate: dict[str, Any]) -> None:
        color = C.COLOR_ERROR if gate["outcome"] == "failed" else C.COLOR_WARN
        self._display.display(f"  {gate['gate']} {gate['outcome']}: {gate.get('reason') or ''}", color=color)
        for line in (gate.get("evidence") or [])[-EVIDENCE_LINES:]:
            self._display.display(f"    {line}", color=color)

    # at the end

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Show what failed, then one table of the fleet."""
        # preflight alone has named the hosts that are not ready just above
        left_out = {} if self._preflight_due else {n: f"left out: {why}" for n, why in self._unready.items()}
        self._show_preflight()
        ours = self._hosts or self._unready
        if not ours or self._display.verbosity:
            super().v2_playbook_on_stats(stats)
        if not ours:
            return
        names = sorted(set(self._hosts) | (set(stats.processed) - {"localhost"}))
        self._display.banner("RESULT")
        for name, problem in sorted({**left_out, **self._problems}.items()):
            self._display.display(wrapped(f"{self._short(name)}: {problem}"), color=C.COLOR_ERROR)
            for gate in self._hosts.get(name, Host()).failed:
                self._evidence(gate)
        rows = [self._row(name, stats.summarize(name)) for name in names]
        # stages that no host came to take no room
        keep = [
            i for i in range(len(rows[0])) if i < 3 or i >= len(rows[0]) - 1 or any(row[i] for row in rows)
        ]
        if len(keep) > 4:
            headings = ("host", "sglang", "variant", *HEADINGS, "changed")
            shown = table(tuple(headings[i] for i in keep), [[row[i] for i in keep] for row in rows])
            self._display.display("\n".join(shown))
            self._display.display("")
        failed = sum(1 for name in names if self._bad(stats.summarize(name)))
        changed = sum(1 for name in names if stats.summarize(name)["changed"])
        self._display.display(
            f"{len(names)} host{'s' if len(names) > 1 else ''}: changed={changed} failed={failed}",
            color=C.COLOR_ERROR if failed else C.COLOR_OK,
        )

    @staticmethod
    def _bad(summary: dict[str, int]) -> bool:
        return bool(summary["failures"] or summary["unreachable"])

    def _row(self, name: str, summary: dict[str, int]) -> list[str]:
        host = self._hosts.get(name, Host())
        if summary["rescued"] and host.changed:
            changed = "ROLLED BACK"
        elif self._bad(summary):
            changed = "FAILED"
        else:
            changed = "yes" if summary["changed"] else "no"
        return [
            self._short(name),
            host.version,
            host.variant,
            *(host.gates.get(gate, "") for gate in GATES),
            changed,
        ]

    def _show_preflight(self) -> None:
        if not self._preflight_due:
            return
        self._preflight_due = False
        rows = []
        for name, host in sorted(self._hosts.items()):
            found = host.capabilities
            gpus = found.get("gpus") or []
            memory = f"{len(gpus)} x {min(gpu['memory_mib'] for gpu in gpus) // 1024} GiB" if gpus else "none"
            running = [unit for unit in found.get("units") or [] if unit["state"] == "active"]
            rows.append(
                [
                    self._short(name),
                    host.version or "-",
                    host.state or "-",
                    host.variant or "-",
                    found.get("python") or "-",
                    f"{(found.get('store_free_mib') or 0) / 1024:.1f} GiB",
                    memory,
                    f"{len(running)}/{len(found.get('units') or [])}",
                ]
            )
        self._display.display("")
        for line in table(("host", "sglang", "state", "variant", "python", "free", "gpu", "units"), rows):
            self._display.display(line)
        for name, why in sorted(self._unready.items()):
            if name not in self._problems:
                self._display.display(wrapped(f"{self._short(name)}: not ready: {why}"), color=C.COLOR_ERROR)
