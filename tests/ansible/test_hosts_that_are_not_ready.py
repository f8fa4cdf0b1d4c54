"""A host that is not ready: one line with what to do; the others go on, or nothing changes, by the policy."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ansible.conftest import Fleet, install, play, start, tree
from tests.conftest import SITE, Reached

pytestmark = pytest.mark.hosts
Fleets = Callable[[list[Reached]], Fleet]


def patched(host: Reached, site: str = SITE) -> bool:
    """Say whether GNU grep finds the flag on the host."""
    return (
        host.sudo(f"grep -rqF speculative-disable-batch-threshold '{site}/sglang'", check=False).returncode
        == 0
    )


def refused(out: str, host: Reached, *words: str) -> None:
    """Assert that the result has a line on the host that says all of this."""
    said = " ".join(out[out.rindex("RESULT") :].split())
    mine = said[said.index(f"{host.name}: ") :]
    assert [word for word in words if word not in mine[:400]] == []


def test_a_host_that_is_down(pair: list[Reached], fleet_of: Fleets) -> None:
    inventory = fleet_of(pair).write()
    before = tree(pair[0])
    pair[1].cut()
    stopped = play("deploy.yml", inventory)
    assert stopped.code == 2
    refused(stopped.out, pair[1], "Connection timed out")
    assert tree(pair[0]) == before

    went_on = play("deploy.yml", inventory, sglang_facts_skip_unready=True)
    assert went_on.code != 0  # the fleet is not deployed
    assert patched(pair[0])
    pair[1].heal()

    resumed = play("deploy.yml", inventory, "--limit", pair[1].name)
    assert resumed.code == 0
    assert patched(pair[1])


def test_a_host_that_is_lost_on_the_way_stops_the_rollout(
    small_hosts: Callable[[int], list[Reached]], fleet_of: Fleets, tmp_path: Path
) -> None:
    hosts = small_hosts(4)
    log = tmp_path / "log"
    with log.open("w") as output:
        process = start("deploy.yml", fleet_of(hosts).write(), output, specgate_batches=[1, 2, 1])
        while f"\n{hosts[0].name}: at work" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        hosts[1].cut()
        assert process.wait(200) != 0
    hosts[1].heal()
    assert f"{hosts[1].name}: UNREACHABLE" in log.read_text()
    # the canary, and the lost host's neighbour in its batch; no batch after it
    assert [patched(host) for host in hosts] == [True, False, True, False]


def test_unfit_hosts_are_left_out(pair: list[Reached], fleet_of: Fleets) -> None:
    fleet = fleet_of(pair)
    inventory = fleet.write()
    pair[0].sudo(f"echo '# mine' >> {SITE}/sglang/srt/server_args.py")
    before = tree(pair[0], "/opt", "/etc")
    ran = play("deploy.yml", inventory, sglang_facts_skip_unready=True)
    assert ran.code != 0
    refused(ran.out, pair[0], "server_args.py")
    assert tree(pair[0], "/opt", "/etc") == before
    assert patched(pair[1])


WRONG: list[tuple[dict[str, object], str]] = [
    ({"specgate_python": "/opt/nothing/bin/python"}, "/opt/nothing/bin/python does not exist"),
    ({"ansible_python_interpreter": "/usr/bin/python9"}, "/usr/bin/python9"),
    ({"ansible_user": "root"}, "Permission denied"),
    ({"sglang_facts_free_mib": 10**9}, "MiB"),
]


def test_one_line_with_what_to_do(small_hosts: Callable[[int], list[Reached]], fleet_of: Fleets) -> None:
    hosts = small_hosts(len(WRONG))
    variables = {host.name: given for host, (given, _) in zip(hosts, WRONG, strict=True)}
    inventory = fleet_of(hosts).write(by_host=variables)
    before = [tree(host) for host in hosts]
    ran = play("deploy.yml", inventory)
    assert ran.code == 2
    for host, (_, words) in zip(hosts, WRONG, strict=True):
        refused(ran.out, host, words)
    assert [tree(host) for host in hosts] == before


def test_read_only_package(pair: list[Reached], fleet_of: Fleets) -> None:
    inventory = fleet_of(pair).write()
    pair[0].sudo(f"mount --bind {SITE} {SITE} && mount -o remount,bind,ro {SITE}")
    ran = play("deploy.yml", inventory)
    assert ran.code == 2
    refused(ran.out, pair[0], "read-only", "remount")
    assert not patched(pair[1])
    pair[0].assert_pristine()


def test_nothing_that_is_given_is_a_command(
    small_hosts: Callable[[int], list[Reached]], fleet_of: Fleets, wheel: bytes
) -> None:
    odd = "/opt/größe 7; $(touch /tmp/injected) 'q"
    site = f"{odd}/lib/python3.11/site-packages"
    hosts = small_hosts(1)
    install(hosts[0], wheel, odd)
    inventory = fleet_of(hosts).write(
        specgate_python=f"{odd}/bin/python",
        specgate_store="/var/lib/spec gate/ü`touch /tmp/injected`",
        specgate_actor="x'; touch /tmp/injected; echo '\n$(touch /tmp/injected)",
    )
    for _ in range(2):
        assert play("deploy.yml", inventory).code == 0
    assert play("verify.yml", inventory).code == 0
    assert play("rollback.yml", inventory).code == 0
    hosts[0].assert_pristine(site)
    audited = hosts[0].sudo("find '/var/lib/spec gate' -name audit.jsonl -exec cat {} +").stdout
    assert "touch /tmp/injected; echo" in audited
    assert hosts[0].sudo("test -e /tmp/injected", check=False).returncode == 1


def test_host_keys(small_hosts: Callable[[int], list[Reached]], fleet_of: Fleets, tmp_path: Path) -> None:
    """One host's key is not known, another's has changed; nothing happens to the third either."""
    hosts = small_hosts(3)
    known, addresses = tmp_path / "known_hosts", tuple(f"{host.address} " for host in hosts[:2])
    true = hosts[0].host.fleet.known_hosts.read_text()
    mine = [line for line in true.splitlines() if not line.startswith(addresses)]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    mine.append(f"{hosts[1].address} {(tmp_path / 'other.pub').read_text()}")
    known.write_text("\n".join(mine) + "\n")
    before = [tree(host) for host in hosts]
    # an inventory that asks for less does not get it
    loose = f"-F /dev/null -o UserKnownHostsFile={known} -o StrictHostKeyChecking=no"
    ran = play("deploy.yml", fleet_of(hosts).write(ansible_ssh_common_args=loose))
    assert ran.code == 2
    for host in hosts[:2]:
        refused(ran.out, host, "Host key verification failed", "known_hosts")
    assert [tree(host) for host in hosts] == before
