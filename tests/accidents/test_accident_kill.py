"""The engine is killed by SIGKILL at each step of its transaction; the next run puts everything right.

The steps are those that the engine itself reports; nothing here lists them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from specgate import operations, serving

from tests.accidents.conftest import start_apply
from tests.unit.engine import mini

PATHS = (mini.SERVER_ARGS, mini.WORKER, mini.CREATED)


def drive(host, operation: str, step: int | str | None = None, **changes) -> list[str] | None:
    """Run one operation in a process of its own; return its steps, or None when it was killed at ``step``."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        seen: list[str] = []

        def on_step(name: str) -> None:
            seen.append(name)
            if step in (name, len(seen) - 1):
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            document = getattr(operations, operation)(
                host.options(actor="victim", on_step=on_step, **changes)
            )
            os.write(tell, json.dumps([document["outcome"], seen]).encode())
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as stream:
        said = stream.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    outcome, steps = json.loads(said)
    assert outcome == "passed" and step is None
    return steps


def save(host, name: str):
    """Copy the host, so that every step begins from the same state. Links and times stay."""
    copy = host.store.parent / name
    shutil.copytree(host.root, copy / "root", symlinks=True)
    if host.store.exists():
        shutil.copytree(host.store, copy / "store")
    return copy


def load(host, copy: Path) -> None:
    shutil.rmtree(host.root)
    shutil.copytree(copy / "root", host.root, symlinks=True)
    shutil.rmtree(host.store, ignore_errors=True)
    if (copy / "store").exists():
        shutil.copytree(copy / "store", host.store)


def nothing_left(host) -> None:
    """Assert that neither the package nor the store holds a half-done file, link or journal."""
    names = [path.name for folder in (host.root, host.store) for path in folder.rglob("*")]
    assert not [
        name for name in names if name.endswith((".new", "specgate-new", "specgate-old", "journal.json"))
    ]
    assert "transaction" not in names


@pytest.fixture(autouse=True)
def quick(host):
    """Leave the import gate out: it changes nothing, so no step lies in it."""
    host.defaults.update(no_import=True, root=str(host.root), python=None)


def scenario(host, operation: str, **changes):
    """Yield (number, name) of each step, with the host as it is after the engine was killed there."""
    copy = save(host, "before")
    steps = drive(host, operation, **changes)
    assert len(steps) > 15
    for number, name in enumerate(steps):
        load(host, copy)
        assert drive(host, operation, number, **changes) is None, name
        yield number, name


def test_apply_killed_anywhere_then_applied(host):
    pristine = host.tree()
    for _, name in scenario(host, "apply", bundle=mini.bundle()):
        for path in PATHS:
            now = mini.sha256sum(host.path(path)) if host.path(path).exists() else None
            state = operations.status(host.options())["files"]
            assert now is not None or path == mini.CREATED, f"{path} is gone after a kill at: {name}"
            assert all(one["pristine_sha256"] == mini.record_sha256(host.root, one["path"]) for one in state)
        document = host.apply()
        assert document["outcome"] == "passed", (name, document)
        assert host.verify()["outcome"] == "passed", name
        nothing_left(host)
        assert host.rollback()["outcome"] == "passed", name
        assert host.tree() == pristine, name


def test_apply_killed_anywhere_then_rolled_back(host):
    pristine = host.tree()
    for _, name in scenario(host, "apply", bundle=mini.bundle()):
        document = host.rollback()
        assert document["outcome"] == "passed", (name, document)
        assert host.tree() == pristine, name
        nothing_left(host)


def test_rollback_killed_anywhere(host):
    pristine = host.tree()
    host.apply()
    patched = host.tree()
    for number, name in scenario(host, "rollback"):
        if number % 2:
            assert host.rollback()["outcome"] == "passed", name
            assert host.tree() == pristine, name
        else:
            assert host.apply()["outcome"] == "passed", name
            assert host.tree() == patched, name
        nothing_left(host)


def test_newer_bundle_killed_anywhere_leaves_old_or_new(host):
    pristine = host.tree()
    host.apply()
    old = host.tree()
    newer = mini.altered(
        lambda variant: variant["files"][0]["edits"][0].update(text=f"{mini.FIELD}: int = 0  # new")
    )
    for _, name in scenario(host, "apply", bundle=newer):
        document = host.verify()
        if document["installation"]["state"] == "patched":
            assert document["outcome"] == "passed", (name, document)
        document = host.apply(newer)
        assert document["outcome"] == "passed", (name, document)
        assert mini.sha256sum(host.path(mini.SERVER_ARGS)) not in old.values()
        assert host.rollback()["outcome"] == "passed"
        assert host.tree() == pristine, name


def test_recovery_killed_anywhere(host):
    """A run that settles an unfinished transaction is killed as well, at each of its own steps."""
    pristine = host.tree()
    steps = drive(host, "apply", bundle=mini.bundle())
    middle = max(number for number, name in enumerate(steps) if name.startswith("renamed"))
    host.rollback()
    shutil.rmtree(host.store)
    assert drive(host, "apply", middle, bundle=mini.bundle()) is None
    assert host.tree() != pristine
    copy = save(host, "crashed")
    recovery = drive(host, "rollback")
    assert recovery
    for number, name in enumerate(recovery):
        load(host, copy)
        assert drive(host, "rollback", number) is None
        assert host.rollback()["outcome"] == "passed", name
        assert host.tree() == pristine, name
        nothing_left(host)


def test_the_audit_log_tells_the_story(host):
    drive(host, "apply", f"renamed {mini.SERVER_ARGS}", bundle=mini.bundle())
    assert operations.status(host.options())["installation"]["state"] == "unfinished"
    host.apply()
    lines = operations.history(host.options(last=2))["history"]
    assert [line["operation"] for line in lines] == ["recover", "apply"]
    assert lines[0].keys() == lines[1].keys()
    assert "victim" in lines[0]["summary"] and "undone" in lines[0]["summary"]


def test_no_server_starts_from_half_the_files(host):
    """The power comes back before the next run does: the unit asks, and the files are neither old nor new."""
    wait = {"until": "importable", "python": str(host.python), "store": str(host.store)}
    assert serving.wait(**wait)["outcome"] == "passed", "pristine files need no proof"
    drive(host, "apply", f"renamed {mini.SERVER_ARGS}", bundle=mini.bundle())
    document = serving.wait(**wait)
    assert document["outcome"] == "failed" and "unfinished" in document["summary"], document
    host.rollback()
    assert serving.wait(**wait)["outcome"] == "passed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_undoes(host, number):
    """SSH was cut, or somebody stopped the unit: the engine undoes its work and says so."""
    before = host.tree()
    stop = f"name.startswith('renamed') and os.kill(os.getpid(), {int(number)})"
    engine = start_apply(host, mini.bundle(), "--no-import", on_step=stop)
    document = json.loads(engine.communicate(timeout=60)[0])
    assert engine.returncode == 3 and document["outcome"] == "undone"
    assert signal.Signals(number).name in document["summary"]
    assert host.tree() == before
    nothing_left(host)
