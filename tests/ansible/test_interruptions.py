"""A deploy that loses its host at each step, to the network or to the power; and a rollback that does.

One run of the playbook meets all of it, on a host for each step. Afterwards half of the hosts are deployed again, the
others are rolled back. docs/faults.md is the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ansible.conftest import Fleet, Ran, main_pid, play, start
from tests.ansible.trouble import (
    COMMON,
    bring_up,
    bundle,
    deployed,
    held,
    hold,
    leftovers,
    release,
    story,
    told,
)
from tests.conftest import HostMaker, Reached

pytestmark = pytest.mark.hosts
# a host that is lost is noticed within three seconds; what else Ansible's own configuration says
SSH = (
    "-o ControlMaster=auto -o ControlPersist=60s -o StrictHostKeyChecking=yes "
    "-o ServerAliveInterval=1 -o ServerAliveCountMax=2"
)


@dataclass(frozen=True)
class Case:
    """What is lost at which step, and the audit log's story after a rerun or a rollback."""

    step: str
    story: tuple[str, ...]
    power: bool = False

    @property
    def rerun(self) -> bool:
        return self.story[-1] == "apply passed"


# The steps that are modules are cut off when they have done their work, and before anybody hears of it.
APPLIED, BACK = "apply passed", "rollback passed"
CASES = {
    "cut-preflight": Case("specgate_info", (APPLIED,)),
    "cut-staged": Case("staged import", ("apply refused", APPLIED, BACK)),
    "cut-live": Case("live import", (APPLIED, APPLIED)),
    "cut-patched": Case("specgate_patch", (APPLIED, BACK)),
    "cut-files": Case("copy", (APPLIED, APPLIED)),
    "cut-start": Case("start", (APPLIED, BACK)),
    "cut-started": Case("specgate_unit", (APPLIED, APPLIED)),
    "cut-gates": Case("gates", (APPLIED, BACK)),
    "power-preflight": Case("specgate_info", (BACK,), power=True),
    "power-live": Case("live import", ("recover passed", APPLIED), power=True),
    "power-live-back": Case("live import", ("recover passed", BACK), power=True),
    "power-start": Case("start", (APPLIED, APPLIED), power=True),
    "power-gates": Case("gates", (APPLIED, BACK), power=True),
}
RERUN = [name for name, case in CASES.items() if case.rerun]
BUSY = "cut-staged"  # its engine is still at work when the others are deployed again


@dataclass
class Lost:
    """Hosts that were lost, each at its step, and what the run said."""

    hosts: dict[str, Reached]
    fleet: Fleet
    out: str


def limit(*names: str) -> list[str]:
    """Return the options that leave all other hosts out."""
    return ["--limit", ",".join(names)]


def interrupted(
    playbook: str, inventory: Path, lose: dict[str, Callable[[], None]], hosts: dict[str, Reached], *more: str
) -> str:
    """Run a playbook, lose each host when its step waits, and return what the run said."""
    log = inventory.with_name("log")
    pending = dict(lose)
    with log.open("w") as output:
        process = start(
            playbook, inventory, output, *more, specgate_batches=["100%"], sglang_facts_skip_unready=True
        )
        try:
            end = time.monotonic() + 300
            while process.poll() is None and time.monotonic() < end:
                for name in [name for name in pending if held(hosts[name])]:
                    pending.pop(name)()
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    said = log.read_text()
    print(said)
    assert pending == {} and process.returncode not in (0, -9)
    return said


def bring_back(cases: dict[Reached, bool]) -> None:
    """Give hosts their power (True) or their network (False) again, and wait until they can be reached."""

    def back(host: Reached, power: bool) -> None:
        if power:
            host.host.start()
        else:
            host.heal()
        host.host.wait(degraded=True)

    with ThreadPoolExecutor() as pool:
        list(pool.map(back, cases.keys(), cases.values()))


@pytest.fixture(scope="module")
def lost(make_hosts: HostMaker, tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """The deploy; afterwards the network is whole and the power is on again."""
    folder = tmp_path_factory.mktemp("lost")
    hosts = bring_up(make_hosts, folder, *CASES)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: hold(hosts[name], CASES[name].step), CASES))
    fleet = Fleet(folder / "hosts.yml", list(hosts.values()))
    fleet.bundle(bundle())
    inventory = fleet.write(
        ansible_python_interpreter="/opt/step", ansible_ssh_args=SSH, ansible_ssh_timeout=4, **COMMON
    )
    lose = {name: hosts[name].kill if case.power else hosts[name].cut for name, case in CASES.items()}
    out = interrupted("deploy.yml", inventory, lose, hosts)
    bring_back({hosts[name]: case.power for name, case in CASES.items()})
    for name, case in CASES.items():
        if not case.power and name != BUSY:
            release(hosts[name])
    return Lost(hosts, fleet, out)


@pytest.fixture(scope="module")
def rerun(lost: Lost) -> Ran:
    """Half of the hosts are deployed again, while one of the others is still at work for the run that was lost."""
    ran = play("deploy.yml", lost.fleet.path, *limit(BUSY, *RERUN), specgate_batches=["100%"])
    release(lost.hosts[BUSY])
    return ran


@pytest.fixture(scope="module")
def rolled_back(lost: Lost, rerun: Ran) -> Ran:
    """The other half is rolled back."""
    return play("rollback.yml", lost.fleet.path, *limit(*(name for name in CASES if name not in RERUN)))


@pytest.mark.parametrize("name", CASES)
def test_a_host_that_is_lost_is_told(lost: Lost, name: str) -> None:
    said = told(lost.out, name, CASES)
    assert "the connection was lost" in said or "Connection timed out" in said, said


def test_an_engine_that_nobody_hears_is_waited_for(lost: Lost, rerun: Ran) -> None:
    assert rerun.code == 2
    assert "another operation is at work on this installation: apply by operator" in told(
        rerun.out, BUSY, CASES
    )


@pytest.mark.parametrize("name", RERUN)
def test_a_rerun_deploys(lost: Lost, rerun: Ran, name: str) -> None:
    host = lost.hosts[name]
    assert told(rerun.out, name, CASES) == ""
    assert deployed(host)
    assert leftovers(host) == []
    assert story(host) == list(CASES[name].story)


@pytest.mark.parametrize("name", [name for name in CASES if name not in RERUN])
def test_a_rollback_ends_at_record(lost: Lost, rolled_back: Ran, name: str) -> None:
    host = lost.hosts[name]
    assert rolled_back.code == 0
    host.assert_pristine()
    assert leftovers(host) == []
    assert story(host) == list(CASES[name].story)


def test_a_rollback_interrupted(lost: Lost, rerun: Ran) -> None:
    """Lost when the files are pristine and the servers are not restarted yet; then rolled back again."""
    names = {"cut-preflight": "cut", "power-live": "kill", "cut-files": "cut"}
    hosts = {name: lost.hosts[name] for name in names}
    for name, host in hosts.items():
        hold(host, "specgate_unit" if name == "cut-files" else "specgate_patch")
    pids = {name: main_pid(host) for name, host in hosts.items()}
    interrupted(
        "rollback.yml",
        lost.fleet.path,
        {name: getattr(hosts[name], how) for name, how in names.items()},
        hosts,
        *limit(*names),
    )
    bring_back({hosts[name]: how == "kill" for name, how in names.items()})
    for host in hosts.values():
        release(host)
    assert main_pid(hosts["cut-preflight"]) == pids["cut-preflight"]
    again = play("rollback.yml", lost.fleet.path, *limit(*names))
    assert again.code == 0
    for name, host in hosts.items():
        host.assert_pristine()
        assert leftovers(host) == []
        assert story(host)[-2:] == [BACK, BACK]
        # numbers of processes begin anew with the power
        assert main_pid(host) not in (0, pids[name] if names[name] == "cut" else 0)
        assert not deployed(host)
