"""Two hosts with real SGLang 0.5.23 and EAGLE-3 on the CPU: what the gates on the running server see.

The tests tell one story, in this order: a good build is deployed, then two bad ones that pass every static gate.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.render import digest, render
from tests.ansible.conftest import Fleet, main_pid, play, tree
from tests.conftest import HostMaker, Reached
from tests.serving.conftest import ARGUMENTS, EAGLE3, ENVIRONMENT, UNIT, curl, probe

pytestmark = [pytest.mark.hosts, pytest.mark.live, pytest.mark.timeout(2400)]

KEY = "k3y-that-nobody-may-see"
WITH_KEY = "--api-key-file /etc/sglang/main.key --threshold 2"
SERVER: dict[str, Any] = {
    "name": "main",
    "model": "/opt/models/llama",
    "port": 30000,
    "gpus": [],
    "speculative_disable_batch_threshold": 2,
    "arguments": {**ARGUMENTS, **EAGLE3},
    "environment": ENVIRONMENT,
}


def mutated(before: str, after: str) -> dict[str, Any]:
    """Return the bundle with its worker changed on purpose: a bad build that says the right things."""
    bundle = render()
    files = [
        file
        for variant in bundle["variants"]
        if "0.5.23" in variant["sglang"]
        for file in variant["files"]
        if before in file.get("create", "")
    ]
    assert len(files) == 1
    files[0]["create"] = files[0]["create"].replace(before, after)
    bundle["version"] += "-mutated"
    bundle["sha256"] = digest(bundle)
    return bundle


SAMPLED = "tokens = self.target.sample(logits, plain)"
BAD = {
    "ignores the threshold": ("plain = batch_size > bound", "plain = False"),
    "wrong tokens, above": (SAMPLED, f"{SAMPLED}\n        tokens = (tokens + 1) % 500"),
}


@pytest.fixture(scope="module")
def hosts(make_hosts: HostMaker) -> list[Reached]:
    return make_hosts("spec2", "spec3", sglang="0.5.23")


@pytest.fixture(scope="module")
def deployed(hosts: list[Reached], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Both hosts serve the good build, which has passed the behaviour gate."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet") / "hosts.yml", hosts)
    fleet.bundle(render())
    fleet.write(
        specgate_environment=ENVIRONMENT,
        sglang_server_instances=[SERVER],
        sglang_server_api_keys={"main": KEY},
        sglang_server_start_seconds=600,
        sglang_server_import_gate=False,
        sglang_health_gates=["health", "configuration", "behaviour"],
    )
    # a start imports more than the import gate does
    ran = play("deploy.yml", fleet.path, timeout=1200, specgate_no_import=True)
    assert ran.code == 0
    assert all(main_pid(host) for host in hosts)
    return fleet


@pytest.fixture
def canary(hosts: list[Reached], deployed: Fleet) -> Reached:
    return hosts[0]


def test_a_good_build_passes_as_before(canary: Reached) -> None:
    options = f"{WITH_KEY} --reference /tmp/before.json"
    assert probe(canary, "record", options=options)["exit_code"] == 0
    document = probe(canary, "health", "configuration", "behaviour", options=options)
    assert document["exit_code"] == 0, document["summary"]
    evidence = "\n".join(document["gates"][-1]["evidence"])
    assert "Batch threshold: speculation off, decode batch 3 exceeds 2" in evidence
    assert "Batch threshold: speculation on" in evidence
    assert "like the 4 answers from before the patch" in evidence


def test_the_key_is_asked_for_and_never_shown(canary: Reached) -> None:
    status = "-o /dev/null -w '%{http_code}'"
    assert curl(canary, "/server_info", status) == "401"
    assert curl(canary, "/server_info", f"{status} -H 'Authorization: Bearer {KEY}'") == "200"
    shown = canary.sudo(
        f"journalctl --no-pager; systemctl show {UNIT}; systemctl cat {UNIT}; cat /proc/*/cmdline; "
        "cat /proc/*/environ; find /var/lib/specgate -type f -exec cat {} +",
        check=False,
    ).stdout
    assert UNIT in shown and KEY not in shown
    modes = canary.sudo("stat -c '%U %a' /etc/sglang /etc/sglang/main.key /etc/sglang/main.env").stdout
    assert modes.splitlines() == ["root 700", "root 600", "root 600"]


def test_a_server_that_hangs_with_its_port_open_is_not_healthy(canary: Reached) -> None:
    scheduler = canary.run("pgrep -u sglang -f 'sglang::scheduler'").stdout.split()
    assert scheduler
    canary.sudo(f"kill -STOP {' '.join(scheduler)}")
    document = probe(canary, "health", options=f"{WITH_KEY} --deadline 3")
    canary.sudo(f"kill -CONT {' '.join(scheduler)}")
    assert document["exit_code"] == 1
    assert "no token within 3 s, though the port is open" in document["summary"]
    assert probe(canary, "health", options=WITH_KEY)["exit_code"] == 0


@pytest.mark.parametrize("said", BAD)
def test_a_bad_worker_hurts_one_canary(hosts: list[Reached], deployed: Fleet, said: str) -> None:
    pids = [main_pid(host) for host in hosts]
    folders = ("/etc", "/var/lib/specgate", "/opt/sglang/lib/python3.11/site-packages/sglang/srt")
    before = tree(hosts[1], *folders)
    deployed.bundle(mutated(*BAD[said]))
    # importing takes long: that a bad worker passes this gate as well is seen once
    bad = play("deploy.yml", deployed.path, timeout=1200, specgate_no_import=said != next(iter(BAD)))
    assert bad.code == 2
    assert said in bad.words
    # the second host was not touched
    assert main_pid(hosts[1]) == pids[1]
    assert tree(hosts[1], *folders) == before
    # the canary serves the good build again, and obeys
    assert main_pid(hosts[0]) not in (0, pids[0])
    assert probe(hosts[0], "health", "configuration", "behaviour", options=WITH_KEY)["exit_code"] == 0
    for host in hosts:
        state = json.loads(host.sudo("cat /var/lib/specgate/installations/*/state.json").stdout)
        assert state["bundle"]["sha256"] == render()["sha256"]


def test_the_audit_log_of_the_canary_names_both(hosts: list[Reached], deployed: Fleet) -> None:
    lines = [json.loads(line) for line in hosts[0].read("/var/lib/specgate/audit.jsonl").splitlines()]
    mutants = [line for line in lines if (line["bundle"] or {}).get("version", "").endswith("-mutated")]
    assert {line["bundle"]["sha256"] for line in mutants} == {mutated(*BAD[said])["sha256"] for said in BAD}
