"""The whole way through ``fab`` on one host with a real SGLang 0.5.9 server on the CPU."""

from __future__ import annotations

import pytest
import yaml

from controller.fleet import ROOT
from tests.conftest import SITE, HostMaker
from tests.fabric.conftest import Inventory, fab, trees
from tests.fabric.test_hosts import pid

pytestmark = [pytest.mark.hosts, pytest.mark.live]


def test_deploy_health_rollback(make_hosts: HostMaker, inventory: Inventory) -> None:
    (host,) = make_hosts("gpu1")
    # the server of the demo fleet
    server = yaml.safe_load((ROOT / "inventory/local/group_vars/gpu.yml").read_text())
    ours = {"specgate_lock_path": "/tmp/specgate-test-fabric.lock", "sglang_server_import_gate": False}
    there = inventory(host, **{**server, **ours})

    before = trees(host, f"{SITE}/sglang/srt")
    dry = fab("deploy", "--dry-run", "--inventory", there)
    assert dry.code == 0, dry.out + dry.err
    assert "+    speculative_disable_batch_threshold: int = 0" in dry.out
    assert trees(host, f"{SITE}/sglang/srt") == before
    early = fab("health", "--inventory", there)
    assert (early.code, "FAILED" in early.out) == (1, True), early.out

    done = fab("deploy", "--inventory", there, timeout=600)
    assert done.code == 0, done.out + done.err
    first = pid(host, "demo")
    healthy = fab("health", "--gates", "health,configuration", "--inventory", there)
    assert healthy.code == 0, healthy.out
    assert healthy.out.splitlines()[-1].split()[:4] == ["gpu1", "demo", "ok", "ok"]
    assert "active: demo" in fab("status", "--inventory", there).out
    assert "fired up and ready to roll" in fab("logs", "--lines", "500", "--inventory", there).out

    back = fab("rollback", "--inventory", there, timeout=600)
    assert back.code == 0, back.out
    host.assert_pristine()
    assert pid(host, "demo") not in (first, "0")
    assert fab("health", "--inventory", there).code == 0
    unpatched = fab("health", "--gates", "configuration", "--inventory", there)
    assert unpatched.code == 1, unpatched.out


def test_a_deploy_that_fails_keeps_its_exit_code(inventory: Inventory, make_hosts: HostMaker) -> None:
    (host,) = make_hosts("gpu2")
    there = inventory(host, specgate_python="/opt/nowhere/bin/python")
    failed = fab("deploy", "--inventory", there)
    assert failed.code == 2, failed.out
    assert "/opt/nowhere/bin/python" in failed.out
