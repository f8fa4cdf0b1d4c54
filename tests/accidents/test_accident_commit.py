"""Trouble around the one moment at which a transaction is done, and signals at bad moments."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from specgate import operations

from tests.accidents.conftest import start_apply
from tests.accidents.test_accident_kill import nothing_left
from tests.unit.engine import mini


@pytest.fixture(autouse=True)
def quick(host):
    host.defaults["no_import"] = True


def failing_at(step):
    def on_step(name):
        if name == step:
            raise OSError(5, "Input/output error", "/dev/sdx")

    return on_step


@pytest.mark.parametrize("step", ["in place state.json", "committed", "journal removed"])
def test_trouble_after_the_commit_undoes_nothing(host, step):
    document = host.apply(on_step=failing_at(step))
    assert document["outcome"] == "passed" and document["changed"], document
    assert step != "committed" or "not tidied up" in document["warnings"][0]
    assert host.verify()["outcome"] in ("passed", "failed")
    assert not host.apply()["changed"], "the next run finds everything in place, and tidies up"
    nothing_left(host)
    assert host.verify()["outcome"] == "passed"
    assert host.rollback()["outcome"] == "passed"


@pytest.mark.parametrize("step", ["state removed", "committed", "journal removed"])
def test_trouble_after_a_rollback_undoes_nothing(host, step):
    pristine = host.tree()
    host.apply()
    document = host.rollback(on_step=failing_at(step))
    assert document["outcome"] == "passed" and document["changed"], document
    assert host.rollback()["outcome"] == "passed"
    assert host.tree() == pristine
    nothing_left(host)


def test_every_error_before_the_commit_undoes(host):
    """The disk fails at each step in turn; the steps are those that the engine reports."""
    pristine = host.tree()
    steps: list[str] = []
    host.apply(on_step=steps.append)
    host.rollback()
    for step in dict.fromkeys(steps[: steps.index("in place state.json")]):
        document = host.apply(on_step=failing_at(step))
        assert document["outcome"] in ("refused", "undone", "passed"), (step, document)
        if document["outcome"] == "passed":
            # an object that was stored before is not stored again
            assert step.startswith(("stored", "opened", "half", "written")), step
            host.rollback()
            continue
        assert "Input/output error" in document["summary"] and "dmesg" in document["remedy"], step
        assert (document["exit_code"] == 3) == (document["outcome"] == "undone")
        assert host.tree() == pristine, step
        nothing_left(host)


def test_undo_that_fails_keeps_the_journal(host):
    pristine = host.tree()

    def broken(name):
        if name.startswith(("bytecode dropped", "restored", "settled")):
            raise OSError(5, "Input/output error")

    document = host.apply(on_step=broken)
    assert (document["outcome"], document["exit_code"]) == ("inconclusive", 3), document
    assert "journal is kept" in document["summary"]
    assert host.status()["installation"]["state"] == "unfinished"
    refused = host.apply(on_step=broken)
    assert refused["exit_code"] == 2 and "could not be settled yet" in refused["summary"]
    assert host.rollback()["outcome"] == "passed"
    assert host.tree() == pristine
    nothing_left(host)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_during_an_import_ends_the_import_too(host, number):
    """The import gate hangs, and somebody stops waiting: no interpreter is left behind."""
    pid = host.store.parent / "pid"
    hang = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    before = host.tree()
    engine = start_apply(host, mini.altered(lambda variant: variant["files"][1].update(create=hang)))
    end = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    engine.send_signal(number)
    began = time.monotonic()
    document = json.loads(engine.communicate(timeout=30)[0])
    assert time.monotonic() - began < 10
    assert engine.returncode == 2 and signal.Signals(number).name in document["summary"]
    assert host.tree() == before
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_second_signal_does_not_cut_short_the_undoing(host):
    before = host.tree()
    again = "name.startswith(('renamed', 'restored')) and os.kill(os.getpid(), 15)"
    engine = start_apply(host, mini.bundle(), "--no-import", on_step=again)
    document = json.loads(engine.communicate(timeout=60)[0])
    assert engine.returncode == 3 and document["outcome"] == "undone"
    assert host.tree() == before
    nothing_left(host)


def test_failed_and_refused_operations_are_in_the_audit_log(host):
    host.apply(mini.altered(lambda variant: variant["files"][0].update(marker_lines=2)))
    host.apply(mini.altered(lambda variant: variant.update(sglang=["0.5.8"])))
    host.apply(on_step=failing_at(f"renamed {mini.WORKER}"))
    host.apply()
    lines = operations.history(host.options())["history"]
    assert [line["outcome"] for line in lines] == ["failed", "refused", "undone", "passed"]
    assert lines[0]["gates"]["source"] == "failed"
    hashes = {one["path"]: one for one in lines[-1]["files"]}
    assert hashes[mini.WORKER]["sha256_before"] == mini.record_sha256(host.root, mini.WORKER)
    assert hashes[mini.WORKER]["sha256_after"] == mini.sha256sum(host.path(mini.WORKER))
