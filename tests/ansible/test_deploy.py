"""Rollouts on real hosts: systemd, sshd, an ordinary user with sudo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ansible.conftest import INSTANCE, UNIT, Fleet, main_pid, play, tree
from tests.conftest import SITE, Reached
from tests.unit.engine import mini

pytestmark = pytest.mark.hosts
# without a canary, where the order of the hosts is not what is tested
AT_ONCE: dict[str, Any] = {"specgate_batches": ["100%"]}


def dies(variant: dict[str, Any]) -> None:
    """Make the worker one that passes every static gate and dies when the server makes it."""
    worker = next(file for file in variant["files"] if file["path"] == mini.WORKER)
    worker["edits"].append({
        "id": "mutant", "place": "first", "text": 'raise RuntimeError("no graph for batch 1")',
        "at": [{"class": "EAGLEWorkerV2"}, {"def": "__init__"}],
    })  # fmt: skip


def breaks_syntax(variant: dict[str, Any]) -> None:
    """Put the flag into the call before it: the accident."""
    args = next(file for file in variant["files"] if file["path"] == mini.SERVER_ARGS)
    flag = next(edit for edit in args["edits"] if edit["id"] == "flag")
    flag["place"] = "replace"
    flag["text"] = (
        'parser.add_argument(\n    "--speculative-accept-threshold-acc"\n'
        '    "--speculative-disable-batch-threshold" type=int)'
    )


def test_deploy_then_again_then_rollback(
    pair: list[Reached], fleet_of: Callable[[list[Reached]], Fleet]
) -> None:
    inventory = fleet_of(pair).write(sglang_server_instances=[INSTANCE])
    before = [tree(host) for host in pair]

    checked = play("deploy.yml", inventory, "--check", "--diff", **AT_ONCE)
    assert checked.code == 0
    assert "+    speculative_disable_batch_threshold: int = 0  # 0 = always speculate" in checked.out
    assert [tree(host) for host in pair] == before

    first = play("deploy.yml", inventory)
    assert (first.code, first.changed) == (0, 2)
    grep = f"grep -rnF speculative_disable_batch_threshold {SITE}/sglang/srt --include=*.py"
    for host in pair:
        assert len(host.sudo(grep).stdout.splitlines()) == 3
        assert (
            "--speculative-disable-batch-threshold 0"
            in host.sudo(f"tr '\\0' ' ' < /proc/{main_pid(host)}/cmdline").stdout
        )
    pids = [main_pid(host) for host in pair]
    assert 0 not in pids

    lines = [json.loads(host.read("/var/lib/specgate/audit.jsonl").splitlines()[-1]) for host in pair]
    assert {line["actor"] for line in lines} == {"operator"}
    assert len({line["run_id"] for line in lines}) == 1

    second = play("deploy.yml", inventory, **AT_ONCE)
    assert (second.code, second.changed) == (0, 0)
    assert [main_pid(host) for host in pair] == pids

    assert play("health.yml", inventory).code == 0
    assert play("verify.yml", inventory).code == 0

    back = play("rollback.yml", inventory)
    assert back.code == 0
    for host, pid in zip(pair, pids, strict=True):
        host.assert_pristine()
        assert main_pid(host) not in (0, pid)
    pids = [main_pid(host) for host in pair]
    again = play("rollback.yml", inventory)
    assert (again.code, again.changed) == (0, 0)
    assert [main_pid(host) for host in pair] == pids


def test_bad_bundles_stop_at_the_canary(
    pair: list[Reached], fleet_of: Callable[[list[Reached]], Fleet]
) -> None:
    """One whose server dies, which is taken back; then one that is refused, which disturbs nobody at all."""
    fleet = fleet_of(pair)
    inventory = fleet.write(sglang_server_instances=[INSTANCE])
    assert play("deploy.yml", inventory, **AT_ONCE).code == 0
    good = tree(pair[0], "/opt/sglang"), tree(pair[1])
    pids = [main_pid(host) for host in pair]

    fleet.bundle(mini.altered(dies))
    bad = play("deploy.yml", inventory)
    assert bad.code == 2
    assert "RuntimeError: no graph for batch 1" in bad.out
    assert "taken back" in bad.words
    # the canary serves the good build again, in a new process; the second host was not touched
    assert [
        line.split()[:2] for line in tree(pair[0], "/opt/sglang").splitlines() if line.endswith(".py")
    ] == [line.split()[:2] for line in good[0].splitlines() if line.endswith(".py")]
    assert main_pid(pair[0]) not in (0, pids[0])
    assert (tree(pair[1]), main_pid(pair[1])) == (good[1], pids[1])
    assert play("health.yml", inventory).code == 0

    before = [tree(host, "/opt", "/etc", "/usr/local") for host in pair]
    pids = [main_pid(host) for host in pair]
    fleet.bundle(mini.altered(breaks_syntax))
    refused = play("deploy.yml", inventory)
    assert refused.code == 2
    assert "SyntaxError" in refused.out or "invalid syntax" in refused.out
    assert [tree(host, "/opt", "/etc", "/usr/local") for host in pair] == before
    assert [main_pid(host) for host in pair] == pids


def test_an_interrupted_deploy_restarts_what_it_patched(
    small_hosts: Callable[[int], list[Reached]], fleet_of: Callable[[list[Reached]], Fleet], tmp_path: Path
) -> None:
    """The files are new, the process is old: the next run must see it, though the patch is in place.

    The commands to drain and to undrain run around a restart, and only then.
    """
    log = tmp_path / "lb log; $(touch x)"
    command = ["/bin/sh", "-c", 'echo "$1 $2" >> "$0"', str(log)]
    (host,) = small_hosts(1)
    fleet = fleet_of([host])
    hooks = {
        f"specgate_{word}_command": [*command, word, "{{ inventory_hostname }}"]
        for word in ("drain", "undrain")
    }
    inventory = fleet.write(sglang_server_instances=[INSTANCE], **hooks)
    around = f"drain {host.name}\nundrain {host.name}\n"
    assert play("deploy.yml", inventory).code == 0
    assert not log.exists()  # nothing ran yet, so nothing was restarted
    assert play("rollback.yml", inventory).code == 0
    assert log.read_text() == around
    log.unlink()

    fleet.write(**hooks)
    pid = main_pid(host)
    assert play("deploy.yml", inventory).code == 0  # patches only: no server is asked for
    assert main_pid(host) == pid and not log.exists()
    fleet.write(sglang_server_instances=[INSTANCE], **hooks)
    again = play("deploy.yml", inventory)
    assert (again.code, again.changed) == (0, 1)
    assert main_pid(host) not in (0, pid)
    assert log.read_text() == around
    log.unlink()
    assert play("deploy.yml", inventory).changed == 0
    assert not log.exists()


def test_the_whole_fleet_can_be_taken_back(
    pair: list[Reached], fleet_of: Callable[[list[Reached]], Fleet]
) -> None:
    fleet = fleet_of(pair)
    inventory = fleet.write(specgate_rollback_fleet_on_failure=True, sglang_server_instances=[INSTANCE])
    # the second host cannot start its server: something else holds the port
    pair[1].sudo("systemd-run -q --unit squatter python3 -m http.server 30000 --bind 127.0.0.1")
    bad = play("deploy.yml", inventory, sglang_server_free_seconds=2)
    assert bad.code == 2
    assert "port 30000" in bad.words
    for host in pair:
        host.assert_pristine()
        assert host.sudo(f"systemctl cat {UNIT}", check=False).returncode != 0
