"""Servers and hosts with faults, met by one deploy: each is told, hurts its own host only, and is gone after a rerun.

Every test asks what one run of the playbook did to its host; docs/faults.md is the list.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.ansible.conftest import UNIT, Fleet, Ran, main_pid, play
from tests.ansible.trouble import (
    COMMON,
    bring_up,
    bundle,
    deployed,
    hold,
    leftovers,
    release,
    story,
    told,
    wheel,
)
from tests.conftest import SITE, HostMaker, Reached

pytestmark = pytest.mark.hosts
DROP_IN = f"/etc/systemd/system/{UNIT}.d/local.conf"
JOURNALS = "/var/log/journal /run/log/journal"


@dataclass(frozen=True)
class Fault:
    """A host's fault: how it comes and goes, what is said of it, and the audit log's story until the rerun."""

    cause: str
    cure: str
    said: tuple[str, ...]
    story: tuple[str, ...] = ("apply passed", "rollback passed")
    serves: bool = False
    variables: dict[str, Any] = field(default_factory=dict)


def server(fault: str, *said: str, **variables: Any) -> Fault:
    """Return the fault of a server, which reads what to do."""
    return Fault(f"echo {fault} > /opt/fault", "rm /opt/fault", said, variables=variables)


def full(folder: str, size: str, leave: int = 0) -> str:
    """Return commands that put a folder on a small disk of its own, and fill it up to ``leave`` KiB."""
    return (
        f"mkdir -p {folder} /mnt/keep && cp -a {folder}/. /mnt/keep/ && "
        f"mount -t tmpfs -o size={size},mode=$(stat -c %a {folder}) small {folder} && "
        f"cp -a /mnt/keep/. {folder}/ && rm -r /mnt/keep; "
        f"cat /dev/zero > {folder}/filler 2> /dev/null; truncate -s -{leave}K {folder}/filler"
    )


FULL_JOURNAL = (
    f"for folder in {JOURNALS}; do mkdir -p $folder; mount -t tmpfs -o size=4m small $folder; done; "
    "systemctl restart systemd-journald; "
    f"for folder in {JOURNALS}; do cat /dev/zero > $folder/filler 2> /dev/null; done; "
    "base64 -w 4000 /dev/urandom | head -c 2M | systemd-cat"
)
EMPTY_JOURNAL = "rm /var/log/journal/filler /run/log/journal/filler; systemctl restart systemd-journald"
NO_SPACE = ("KiB free", "are needed; free some space (df -h)")
FAULTS = {
    "never-ready": server(
        "never ready", "does not serve after 3 s", "Loading weights: 1 of 4", sglang_server_start_seconds=3
    ),
    "dies-when-ready": server(
        "dies when ready", "the server is not running", "RuntimeError: an illegal memory access"
    ),
    "hangs": server("hangs", "no token within 3 s, though the port is open", sglang_health_seconds=3),
    "busy": Fault(
        "echo busy > /opt/fault",
        f"rm /opt/fault; systemctl restart {UNIT}",
        ("inconclusive, so the rollout stops here and the host stays as it is", "works for others"),
        ("apply passed",),
        serves=True,
        variables={"sglang_health_seconds": 3},
    ),
    "out-of-memory": server("eats memory", "killed by SIGKILL", "for want of memory", "journalctl -k"),
    "port-taken": Fault(
        "systemd-run -q --unit squatter python3 -m http.server 30000 --bind 127.0.0.1",
        "systemctl stop squatter",
        ("port 30000 is taken by process", "squatter.service"),
        variables={"sglang_server_free_seconds": 1},
    ),
    "store-full": Fault(
        full("/var/lib/specgate", "4m", leave=64),
        "rm /var/lib/specgate/filler",
        ("/var/lib/specgate", *NO_SPACE),
        ("apply refused",),
        variables={"sglang_facts_free_mib": 0},  # it fills up after preflight
    ),
    "package-full": Fault(full(SITE, "4m"), f"rm {SITE}/filler", (SITE, *NO_SPACE), ("apply refused",)),
    "journal-full": Fault(FULL_JOURNAL, EMPTY_JOURNAL, (), ("apply passed",), serves=True),
    "silent": Fault(
        f"echo dies at once > /opt/fault; {FULL_JOURNAL}",
        f"rm /opt/fault; {EMPTY_JOURNAL}",
        ("exit status 1; its journal is empty: is the disk full (df -h /var/log/journal",),
    ),
}  # fmt: skip


@dataclass
class Left:
    """A host as the first run left it: what differs from RECORD, what was left behind, and who serves."""

    record: str
    leftovers: list[str]
    story: list[str]
    unit: bool
    pid: int


def look(host: Reached) -> Left:
    try:
        host.assert_pristine()
        record = ""
    except AssertionError as error:
        record = str(error)
    unit = host.sudo(f"systemctl cat {UNIT}", check=False).returncode == 0
    return Left(record, leftovers(host), story(host), unit, main_pid(host))


@dataclass
class Rollout:
    """Hosts with faults, one each, and the deploy that met them."""

    hosts: dict[str, Reached]
    fleet: Fleet
    out: str
    left: dict[str, Left]


@pytest.fixture(scope="module")
def rollout(make_hosts: HostMaker, tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    """The deploy, with every fault in one batch."""
    folder = tmp_path_factory.mktemp("faults")
    hosts = bring_up(make_hosts, folder, *(name for name in FAULTS if name != "out-of-memory"))
    hosts |= bring_up(make_hosts, folder, "out-of-memory", memory="700m")
    for name, fault in FAULTS.items():
        hosts[name].sudo(fault.cause)
    fleet = Fleet(folder / "hosts.yml", [hosts[name] for name in FAULTS])
    fleet.bundle(bundle())
    by_host = {name: fault.variables for name, fault in FAULTS.items()}
    inventory = fleet.write(by_host=by_host, **COMMON)
    ran = play("deploy.yml", inventory, specgate_batches=["100%"])
    assert ran.code == 2
    return Rollout(hosts, fleet, ran.out, {name: look(host) for name, host in hosts.items()})


@pytest.fixture(scope="module")
def rerun(rollout: Rollout) -> Ran:
    """The same deploy, after the faults have been put right."""
    for name, fault in FAULTS.items():
        rollout.hosts[name].sudo(fault.cure)
    return play("deploy.yml", rollout.fleet.path, specgate_batches=["100%"])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(rollout: Rollout, name: str) -> None:
    fault, left = FAULTS[name], rollout.left[name]
    said = told(rollout.out, name, FAULTS)
    assert [words for words in fault.said if words not in said] == [], said
    assert (left.story, left.leftovers) == (list(fault.story), [])
    assert fault.serves == left.unit == bool(left.pid)
    assert fault.serves or left.record == ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_rerun_deploys(rollout: Rollout, rerun: Ran, name: str) -> None:
    host = rollout.hosts[name]
    assert rerun.code == 0
    assert deployed(host)
    assert leftovers(host) == []
    assert story(host) == [*FAULTS[name].story, "apply passed"]


# what people do to a host that is deployed


@dataclass
class Edited:
    """Hosts that somebody has touched since the deploy, one each, and the deploy that met them."""

    hosts: dict[str, Reached]
    out: str
    pids: dict[str, int]


HANDS = {
    "unit-edited": "never-ready",
    "drop-in": "dies-when-ready",
    "upgraded": "hangs",
    "second-operator": "port-taken",
    "clock-put-back": "journal-full",
}


@pytest.fixture(scope="module")
def edited(rollout: Rollout, rerun: Ran, tmp_path_factory: pytest.TempPathFactory) -> Edited:
    """A deploy to hosts on which people have been at work."""
    hosts = {what: rollout.hosts[name] for what, name in HANDS.items()}
    hosts["unit-edited"].sudo(
        f"sed -i s/^RestartSec=.*/RestartSec=77/ /etc/systemd/system/{UNIT}; systemctl daemon-reload"
    )
    hosts["drop-in"].sudo(f"mkdir /etc/systemd/system/{UNIT}.d")
    hosts["drop-in"].put(DROP_IN, b"[Service]\nEnvironment=LOCAL=1\n")
    hosts["drop-in"].sudo(f"systemctl daemon-reload; systemctl restart {UNIT}")
    hosts["upgraded"].put("/tmp/newer.whl", wheel(tmp_path_factory.mktemp("newer"), "0.5.10"))
    hosts["upgraded"].sudo(
        f"cd {SITE} && rm -r sglang-0.5.9.dist-info && python3 -m zipfile -e /tmp/newer.whl ."
    )
    hold(hosts["second-operator"], "staged import")
    # alice's engine, by hand, with the patch in use
    hosts["second-operator"].sudo(
        "setsid python3 /usr/local/lib/specgate/specgate.pyz apply --python /opt/sglang/bin/python --actor alice "
        "--bundle /var/lib/specgate/bundles/*.json > /dev/null 2>&1 & "
        "for i in $(seq 200); do test -e /var/cache/held && exit 0; sleep 0.1; done; exit 1"
    )
    hosts["clock-put-back"].sudo(f"find {SITE}/sglang -name '*.py' -exec touch -d '+1 day' {{}} +")
    pids = {what: main_pid(host) for what, host in hosts.items()}
    touched = Fleet(rollout.fleet.path.with_name("touched.yml"), list(hosts.values()))
    touched.write(**COMMON)
    ran = play(
        "deploy.yml", touched.path, "--diff", specgate_batches=["100%"], sglang_facts_skip_unready=True
    )
    assert ran.code == 2
    release(hosts["second-operator"])
    return Edited(hosts, ran.out, pids)


def test_a_unit_edited_by_hand_is_shown_and_put_back(edited: Edited) -> None:
    host = edited.hosts["unit-edited"]
    assert "-RestartSec=77\n+RestartSec=5\n" in edited.out
    assert "RestartSec=5\n" in host.read(f"/etc/systemd/system/{UNIT}")
    assert host.run(f"systemctl show -P RestartUSec {UNIT}").stdout == "5s\n"
    assert deployed(host) and main_pid(host) != edited.pids["unit-edited"]


def test_a_drop_in_is_kept_and_no_reason_to_restart(edited: Edited) -> None:
    host = edited.hosts["drop-in"]
    assert "LOCAL=1" in host.run(f"systemctl show -P Environment {UNIT}").stdout
    assert host.read(DROP_IN) == "[Service]\nEnvironment=LOCAL=1\n"
    assert deployed(host) and main_pid(host) == edited.pids["drop-in"]


def test_sglang_upgraded_underneath_is_left_alone_and_rolled_back(rollout: Rollout, edited: Edited) -> None:
    host = edited.hosts["upgraded"]
    said = told(edited.out, HANDS["upgraded"], FAULTS)
    assert "no variant" in said and "0.5.10" in said, said
    assert main_pid(host) == edited.pids["upgraded"]
    assert play("rollback.yml", rollout.fleet.path, "--limit", host.name).code == 0
    host.assert_pristine()
    assert main_pid(host) not in (0, edited.pids["upgraded"])
    assert story(host)[-1] == "rollback passed" and leftovers(host) == []


def test_a_second_operator_on_the_host_is_waited_for(edited: Edited) -> None:
    host = edited.hosts["second-operator"]
    said = told(edited.out, HANDS["second-operator"], FAULTS)
    assert "another operation is at work on this installation: apply by alice since" in said, said
    assert deployed(host) and main_pid(host) == edited.pids["second-operator"]
    assert story(host)[-2:] == ["apply refused", "apply passed"] and leftovers(host) == []


# the clock

# Every clock that Python tells the time of day from, a day off.
SHIFTED = """\
import datetime, os, time
shift, now, now_ns = int(os.environ["SHIFT"]), time.time, time.time_ns
time.time = lambda: now() + shift
time.time_ns = lambda: now_ns() + shift * 10**9

class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=shift)

datetime.datetime = Shifted
"""
DAY = 86400


def test_files_from_the_future_cost_one_restart(rollout: Rollout, edited: Edited) -> None:
    """The clock was a day ahead when they were written, and was put back."""
    host = edited.hosts["clock-put-back"]
    pid = main_pid(host)
    assert deployed(host) and pid != edited.pids["clock-put-back"]
    again = play("deploy.yml", rollout.fleet.path, "--limit", host.name)
    assert (again.code, again.changed) == (0, 0)
    assert main_pid(host) == pid


def test_a_clock_that_jumps_changes_nothing(rollout: Rollout, edited: Edited) -> None:
    host = edited.hosts["clock-put-back"]
    host.sudo("mkdir /opt/clock")
    host.put("/opt/clock/sitecustomize.py", SHIFTED.encode())
    for more in ("", " or more"):
        host.put(f"/opt/clock/bundle{len(more)}", json.dumps(bundle(more)).encode())

    def engine(operation: str, shift: int, options: str = "") -> dict[str, Any]:
        said = host.sudo(
            f"PYTHONPATH=/opt/clock SHIFT={shift} python3 /usr/local/lib/specgate/specgate.pyz {operation} --json "
            f"--python /opt/sglang/bin/python {options}",
            check=False,
        ).stdout
        document: dict[str, Any] = json.loads(said)
        assert document["outcome"] == "passed", document
        return document

    engine("rollback", -DAY)
    host.assert_pristine()
    began = engine("apply", DAY, "--bundle /opt/clock/bundle0")["started"]
    assert engine("verify", 0, "--bundle /opt/clock/bundle0")["started"] < began
    assert engine("apply", 0, "--bundle /opt/clock/bundle8")["changed"]
    assert not engine("apply", DAY, "--bundle /opt/clock/bundle8")["changed"]
    assert engine("rollback", -DAY)["changed"]
    host.assert_pristine()
    assert leftovers(host) == []
    assert story(host)[-5:] == ["rollback passed", *["apply passed"] * 3, "rollback passed"]
