"""A bad build that every static gate lets through, on two hosts with real SGLang 0.5.23 and EAGLE-3 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from controller.render import render
from tests.ansible.conftest import Fleet, main_pid, play, tree
from tests.conftest import HostMaker, Reached
from tests.serving.conftest import ARGUMENTS, EAGLE3, ENVIRONMENT
from tests.serving.test_behaviour_live import mutated

pytestmark = [pytest.mark.hosts, pytest.mark.live, pytest.mark.timeout(2400)]

SERVER: dict[str, Any] = {
    "name": "main",
    "model": "/opt/models/llama",
    "port": 30000,
    "gpus": [],
    "speculative_disable_batch_threshold": 2,
    "arguments": {**ARGUMENTS, **EAGLE3},
    "environment": ENVIRONMENT,
}


def test_a_worker_that_ignores_the_threshold_hurts_one_canary(
    make_hosts: HostMaker, fleet_of: Callable[[list[Reached]], Fleet]
) -> None:
    hosts = make_hosts("spec2", "spec3", sglang="0.5.23")
    fleet = fleet_of(hosts)
    inventory = fleet.write(
        specgate_environment=ENVIRONMENT,
        sglang_server_instances=[SERVER],
        sglang_server_start_seconds=600,
        sglang_health_gates=["health", "configuration", "behaviour"],
    )
    good = render()
    fleet.bundle(good)
    ran = play("deploy.yml", inventory, timeout=1200)
    assert ran.code == 0
    pids = [main_pid(host) for host in hosts]
    folders = ("/etc", "/var/lib/specgate", "/opt/sglang/lib/python3.11/site-packages/sglang/srt")
    before = tree(hosts[1], *folders)

    fleet.bundle(mutated("plain = batch_size > bound", "plain = False"))
    bad = play("deploy.yml", inventory, timeout=1200)
    assert bad.code == 2
    assert "ignores the threshold" in bad.words
    # the canary serves the good build again, and obeys; the second host was not touched
    assert main_pid(hosts[0]) not in (0, pids[0])
    assert main_pid(hosts[1]) == pids[1]
    assert tree(hosts[1], *folders) == before
    assert play("health.yml", inventory, timeout=600).code == 0
    for host in hosts:
        state = json.loads(host.sudo("cat /var/lib/specgate/installations/*/state.json").stdout)
        assert state["bundle"]["sha256"] == good["sha256"]
