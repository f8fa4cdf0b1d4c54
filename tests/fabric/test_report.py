"""What people see of a fleet of eight at 80 columns."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import tasks
from controller import report
from controller.connect import HostError
from controller.fleet import Host

NAMES = [f"gpu-{rack}0{number}.example.net" for rack in "ab" for number in range(1, 5)]


def passed(name: str) -> dict[str, Any]:
    said = report.document("verify", Host(name, name), "in place", seconds=12.3)
    gates = [
        {"gate": gate, "outcome": "passed", "proved": "it", "evidence": [f"{gate} seen"], "reason": None}
        for gate in ("source", "compile", "import", "flag")
    ]
    installation = {"version": "0.5.12.post1", "state": "patched", "notes": []}
    return said | {"gates": gates, "installation": installation}


def failed(name: str) -> dict[str, Any]:
    said = passed(name)
    said["gates"][2].update(outcome="failed", reason="it raises SyntaxError", evidence=["line 3981"])
    return said | {"outcome": "failed", "exit_code": 1, "summary": "import gate", "remedy": "roll back"}


@pytest.fixture
def fleet() -> dict[str, dict[str, Any]]:
    said = {name: passed(name) for name in NAMES}
    said[NAMES[5]] = failed(NAMES[5])
    error = HostError("cannot connect: no answer within 10 s", "is it up?")
    said[NAMES[6]] = report.no_answer("verify", Host(NAMES[6], NAMES[6]), error)
    return said


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(report, "out", Console(file=file, width=80, highlight=False))
    return file


def test_the_table_fits_and_has_a_row_for_each_host(
    fleet: dict[str, dict[str, Any]], screen: io.StringIO
) -> None:
    report.fleet(fleet, [tasks.SGLANG, *tasks.GATES, tasks.OUTCOME])
    lines = [line.rstrip() for line in screen.getvalue().splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[2:]] == NAMES
    row = lines[2 + 5].split()
    assert row[1:] == ["0.5.12.post1", "ok", "ok", "FAILED", "ok", "failed"]


def test_the_failed_gate_comes_first_with_its_evidence(
    fleet: dict[str, dict[str, Any]], screen: io.StringIO
) -> None:
    report.evidence(fleet, all_hosts=True)
    lines = [line for line in screen.getvalue().splitlines() if line]
    assert lines[:5] == [
        NAMES[5],
        "  failed: import gate",
        "  to do: roll back",
        "  import failed: it raises SyntaxError",
        "  line 3981",
    ]
    assert [line for line in lines if not line.startswith(" ")] == NAMES[5:7] + NAMES[:5] + NAMES[7:]


def test_hosts_that_are_well_stay_out_of_the_way(
    fleet: dict[str, dict[str, Any]], screen: io.StringIO
) -> None:
    report.evidence(fleet)
    assert [line for line in screen.getvalue().splitlines() if line in NAMES] == NAMES[5:7]


def test_what_a_host_says_is_never_markup(screen: io.StringIO) -> None:
    said = {"gpu1": failed("gpu1") | {"summary": "[red]not[/red] [/] markup"}}
    report.evidence(said)
    report.fleet(said, [("said", report.said)])
    assert screen.getvalue().count("[red]not[/red] [/] markup") == 2
