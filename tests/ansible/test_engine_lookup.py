"""The lookup of the engine: Ansible's workers, forked from one process, ask for it at the same moment."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path

import pytest
from ansible import constants

FILE = Path(__file__).resolve().parents[2] / "plugins" / "lookup" / "specgate_engine.py"


def test_many_workers_pack_it_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("specgate_engine", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    lookup, fork = module.LookupModule(), multiprocessing.get_context("fork")
    barrier, replace = fork.Barrier(4), Path.replace

    def late(path: Path, target: Path) -> Path:
        barrier.wait(20)  # until every worker has written its file
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", late)
    workers = [fork.Process(target=lookup.run, args=([],)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["specgate.pyz"]
