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
    assert [line.split()[0] for line in lines[2:]] == [name.partition(".")[0] for name in NAMES]
    row = lines[2 + 5].split()
    assert row[1:] == ["0.5.12.post1", "ok", "ok", "FAILED", "ok", "failed"]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a.x.net", "b.x.net threshold"], ["a", "b threshold"]),
        (["a.x.net", "b.y.net"], ["a.x.net", "b.y.net"]),
        (["198.51.100.11"], ["198.51.100.11"]),
        (["gpu1", "gpu2"], ["gpu1", "gpu2"]),
    ],
)
def test_names_are_as_short_as_they_can_be(names: list[str], shown: list[str], screen: io.StringIO) -> None:
    report.fleet({name: passed(name) for name in names}, [tasks.SGLANG])
    rows = [line.rpartition("0.5.12")[0].strip() for line in screen.getvalue().splitlines()]
    assert [row for row in rows if row] == shown


def test_the_status_of_eight_hosts_is_one_screen(screen: io.StringIO) -> None:
    bundle = {"version": "1.0.0", "since": "2026-12-01T12:45:46Z"}
    units = {f"sglang@{name}.service": "active" for name in ("baseline", "threshold")}
    said = {
        name: passed(name) | {"gates": [], "bundle": bundle, "units": dict(units), "outdated": []}
        for name in NAMES
    }
    said[NAMES[1]]["outdated"] = ["sglang@threshold.service"]
    said[NAMES[2]]["units"]["sglang@threshold.service"] = "failed"
    said[NAMES[3]] |= {"installation": None, "units": {}, "outcome": "unreachable", "bundle": None}
    report.fleet(said, tasks.STATUS)
    text = screen.getvalue()
    lines = [line.rstrip() for line in text.splitlines()]
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "…" not in text
    rows = [" ".join(row.split()) for row in text.split("gpu-")[1:]]
    well = "0.5.12.post1 patched 1.0.0 12-01 12:45"
    assert rows[:4] == [
        f"a01 {well} active: baseline, threshold",
        f"a02 {well} old code: threshold active: baseline",
        f"a03 {well} failed: threshold active: baseline",
        "a04 - unreachable - - -",
    ]


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
