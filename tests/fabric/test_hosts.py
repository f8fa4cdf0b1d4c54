"""Fabric on real hosts: one connection each, dry runs, odd paths, faults, rollback with its servers."""

from __future__ import annotations

import json
import shlex
import signal
import time
from pathlib import Path

import pytest

from controller import remote
from controller.connect import KEEPALIVE, LOST_AFTER
from controller.fleet import load
from tests.conftest import SITE, HostMaker, Reached
from tests.fabric.conftest import Inventory, fab, logins, start, trees

pytestmark = pytest.mark.hosts

SERVER_ARGS = f"{SITE}/sglang/srt/server_args.py"
FLAG = "speculative_disable_batch_threshold|speculative-disable-batch-threshold"
STORE = "/var/lib/specgate"


@pytest.fixture(scope="module")
def pair(make_hosts: HostMaker) -> list[Reached]:
    return make_hosts("gpu1", "gpu2")


@pytest.fixture(autouse=True)
def pristine(pair: list[Reached]) -> None:
    """Every test finds pristine hosts without a store."""
    for host in pair:
        host.sudo(
            f"cd {SITE}/sglang/srt && rm -rf {STORE} && "
            "if test -e /srv/pristine; then cp -a /srv/pristine/. ./; rm -f speculative/batch_threshold.py; "
            "else mkdir /srv/pristine && "
            "cp -a --parents server_args.py speculative/eagle_worker_v2.py /srv/pristine/; fi"
        )


def test_verify_shows_what_grep_and_the_import_say(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(*pair)
    assert fab("patch", "--inventory", there).code == 0
    proven = inventory(*pair, specgate_no_import=False)
    before = [logins(host) for host in pair]
    ran = fab("verify", "--inventory", proven)
    after = [logins(host) for host in pair]
    assert ran.code == 0, ran.out + ran.err
    assert [late - early - 1 for early, late in zip(before, after, strict=True)] == [1, 1]
    blocks = ran.out.split("\n\n")
    for host in pair:
        (block,) = [block for block in blocks if block.strip().startswith(host.name + "\n")]
        shown = [line.removeprefix("  ") for line in block.splitlines()]
        found = host.run(f"grep -nE {shlex.quote(FLAG)} {SERVER_ARGS}").stdout.splitlines()
        assert found[0].startswith("476:") and set(found) & set(shown) == set(found[:3])
        assert {"server_args OK", "eagle_worker_v2 OK"} <= set(shown)
    table = ran.out.splitlines()[-4:]
    assert [line.split()[0] for line in table[-2:]] == ["gpu1", "gpu2"]
    assert max(map(len, table)) <= 80


def test_each_engine_task_is_one_login(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(pair[0])
    for task in ("preflight", "backup", "patch", "verify", "status", "history", "rollback"):
        before = logins(pair[0])
        ran = fab(task, "--inventory", there)
        assert (ran.code, logins(pair[0]) - before - 1) == (0, 1), task + ran.out + ran.err


def test_patch_then_rollback_ends_at_record(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(*pair)
    first, second = fab("patch", "--inventory", there, "--json"), fab("patch", "--inventory", there, "--json")
    assert [document["changed"] for document in first.hosts.values()] == [True, True]
    assert [document["changed"] for document in second.hosts.values()] == [False, False]
    back = fab("rollback", "--inventory", there, "--json")
    assert [document["changed"] for document in back.hosts.values()] == [True, True]
    for host in pair:
        host.assert_pristine()
    assert fab("rollback", "--inventory", there).code == 0


@pytest.mark.parametrize("task", ["patch", "backup", "rollback"])
def test_dry_run_changes_nothing(pair: list[Reached], inventory: Inventory, task: str) -> None:
    there = inventory(pair[0])
    if task == "rollback":
        assert fab("patch", "--inventory", there).code == 0
    before = trees(pair[0], SITE + "/sglang/srt", STORE)
    ran = fab(task, "--dry-run", "--inventory", there)
    assert ran.code == 0, ran.out + ran.err
    assert trees(pair[0], SITE + "/sglang/srt", STORE) == before
    if task != "backup":
        assert ("+" if task == "patch" else "-") + "    speculative_disable_batch_threshold: int" in ran.out


def test_backup_keeps_pristine_bytes_and_nothing_else(pair: list[Reached], inventory: Inventory) -> None:
    host, there = pair[0], inventory(pair[0])
    before = trees(host, SITE + "/sglang/srt")
    assert fab("backup", "--inventory", there).code == 0
    assert trees(host, SITE + "/sglang/srt") == before
    kept = host.sudo(f"find {STORE}/objects -type f -exec sha256sum {{}} +").stdout.split()[::2]
    record = host.recorded()
    wanted = ("sglang/srt/server_args.py", "sglang/srt/speculative/eagle_worker_v2.py")
    assert sorted(kept) == sorted(record[path] for path in wanted)


def test_odd_paths_are_paths_and_no_commands(pair: list[Reached], inventory: Inventory) -> None:
    host = pair[0]
    odd = "/srv/a b'c\"$(touch /tmp/injected)`touch /tmp/injected`;é{}*\\"
    host.sudo(f"mkdir -p {shlex.quote(odd)}/store")
    host.sudo(f"cp -a {SITE}/sglang {SITE}/sglang-0.5.9.dist-info {shlex.quote(odd)}/", timeout=300)
    there = inventory(host, specgate_root=odd, specgate_python="", specgate_store=f"{odd}/store")
    for task in ("preflight", "patch", "verify", "status", "history"):
        ran = fab(task, "--inventory", there)
        assert ran.code == 0, ran.out + ran.err
    patched = shlex.quote(f"{odd}/sglang/srt/server_args.py")
    assert len(host.run(f"grep -E {shlex.quote(FLAG)} {patched}").stdout.splitlines()) >= 3
    assert fab("rollback", "--inventory", there).code == 0
    restored = host.run(f"sha256sum < {patched}").stdout.split()[0]
    assert restored == host.recorded()["sglang/srt/server_args.py"]
    assert host.run("test -e /tmp/injected", check=False).returncode == 1
    assert not Path("/tmp/injected").exists()
    host.assert_pristine()


FAULTS = {
    "interpreter": (
        {"ansible_python_interpreter": "/usr/bin/python9"},
        "interpreter /usr/bin/python9 cannot be run",
    ),
    "server's interpreter": ({"specgate_python": "/opt/nowhere/bin/python"}, "/opt/nowhere/bin/python"),
    "root": ({"specgate_root": "/srv/nowhere", "specgate_python": ""}, "/srv/nowhere"),
    "port": ({"ansible_port": 2222}, "port 2222"),
    "address": ({"ansible_host": "nobody.invalid"}, "no address for nobody.invalid"),
    "option": ({"ansible_host": "-oProxyCommand=touch /tmp/injected"}, "is not a host name"),
    "key": ({"ansible_ssh_private_key_file": "/nowhere/key"}, "/nowhere/key cannot be read"),
    "user": ({"ansible_user": "nobody"}, "login as nobody was refused"),
    "no such user": ({"ansible_become_user": "no-such-user"}, "sudo refused: unknown user no-such-user"),
    "not allowed": ({"ansible_become_user": "daemon"}, "sudo refused: a password is required"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_host_that_is_wrong_is_one_line_and_the_other_goes_on(
    pair: list[Reached], inventory: Inventory, fault: str
) -> None:
    variables, said = FAULTS[fault]
    ran = fab("preflight", "--inventory", inventory(*pair, by_host={"gpu1": variables}))
    assert ran.code == 1
    lines = ran.out.splitlines()
    (told,) = [line for line in lines if line.startswith(("  unreachable: ", "  failed: ", "  refused: "))]
    assert said in told, ran.out
    assert lines[lines.index(told) + 1].startswith("  to do: ")
    assert "Traceback" not in ran.out + ran.err
    assert lines[-1].split()[:3] == ["gpu2", "0.5.9", "pristine"]


def test_unknown_host_key_is_refused(pair: list[Reached], inventory: Inventory, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.touch()
    # an inventory that asks for less does not get it
    loose = f"-F /dev/null -o UserKnownHostsFile={empty} -o StrictHostKeyChecking=no"
    there = inventory(pair[0], ansible_ssh_common_args=loose)
    before = logins(pair[0])
    ran = fab("verify", "--inventory", there)
    assert ran.code == 1
    fingerprint = pair[0].run("ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").stdout.split()[1]
    assert f"host key is unknown: ssh-ed25519 {fingerprint}" in ran.out
    assert logins(pair[0]) - before == 2  # those of this test and of the one that has just read the key
    assert empty.read_text() == ""


def test_changed_host_key_is_refused(pair: list[Reached], inventory: Inventory, tmp_path: Path) -> None:
    one, two = (host.host.fleet.known_hosts.read_text() for host in pair)
    keys = {line.split()[0]: line.split(None, 1)[1] for line in (one + two).splitlines()}
    swapped = tmp_path / "known hosts"
    swapped.write_text(f"{pair[0].address} {keys[pair[1].address]}\n")
    args = f"-F /dev/null -o 'UserKnownHostsFile=\"{swapped}\"'"
    before = logins(pair[0])
    ran = fab("rollback", "--inventory", inventory(pair[0], ansible_ssh_common_args=args))
    assert (ran.code, logins(pair[0]) - before) == (1, 1)
    assert "host key has CHANGED" in ran.out and "ssh-keygen -R" in ran.out


def test_a_host_behind_another(pair: list[Reached], inventory: Inventory, tmp_path: Path) -> None:
    fleet = pair[0].host.fleet
    config = tmp_path / "ssh config"
    config.write_text(
        f"Host *\n User deploy\n IdentityFile {fleet.key}\n UserKnownHostsFile {fleet.known_hosts}\n"
        f"Match originalhost {pair[1].address}\n ProxyJump {pair[0].address}\n"
    )
    before = logins(pair[0])
    there = inventory(pair[1], ansible_ssh_common_args=f"-F '{config}'")
    assert fab("preflight", "--inventory", there).code == 0
    assert logins(pair[0]) - before - 1 == 1
    assert pair[0].address in pair[1].sudo("journalctl -t sshd -o cat | grep ^Accepted").stdout


def test_preflight_shows_what_a_host_can_do(pair: list[Reached], inventory: Inventory) -> None:
    rows = "NVIDIA H200, 143000\\nNVIDIA H200, 81920\\n"  # as nvidia-smi prints them
    pair[0].put("/usr/local/bin/nvidia-smi", f"#!/bin/sh\nprintf '{rows}'\n".encode(), "755")
    ran = fab("preflight", "--inventory", inventory(*pair), "--json")
    pair[0].sudo("rm /usr/local/bin/nvidia-smi")
    assert ran.hosts["gpu1"]["gpus"] == [["NVIDIA H200", 143000], ["NVIDIA H200", 81920]]
    assert ran.hosts["gpu2"]["gpus"] == []
    free = int(pair[1].run("df -m --output=avail /var/lib | tail -1").stdout)
    assert abs(ran.hosts["gpu2"]["free_mib"] - free) < 200


def slow(seconds: int, *hosts: Reached) -> str:
    """Give hosts an interpreter that takes its time and notes when it ran; return its path."""
    script = f"""#!/bin/sh
date +%s.%N >> /run/slow; sleep {seconds}; date +%s.%N >> /run/slow; exec /opt/sglang/bin/python "$@"
"""
    for host in hosts:
        host.sudo("rm -f /run/slow")
        host.put("/opt/slow", script.encode(), "755")
    return "/opt/slow"


def runs_slowly(host: Reached) -> None:
    """Wait until that interpreter runs on a host."""
    deadline = time.monotonic() + 60
    while host.run("test -s /run/slow", check=False).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_hosts_are_worked_on_at_once(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(*pair, specgate_python=slow(3, *pair))
    assert fab("preflight", "--inventory", there).code == 0
    (begin1, end1), (begin2, end2) = (
        [float(line) for line in host.read("/run/slow").split()[:2]] for host in pair
    )
    assert begin1 < end2 and begin2 < end1


def test_a_cut_ends_the_task_in_bounded_time(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(*pair, specgate_python=slow(8, *pair))
    process = start("preflight", "--inventory", there)
    runs_slowly(pair[1])
    pair[1].cut()
    try:
        began = time.monotonic()
        out, _ = process.communicate(timeout=120)
        took = time.monotonic() - began
    finally:
        pair[1].heal()
    pair[1].sudo("pkill -f '[s]pecgate.pyz'", check=False)
    assert process.returncode == 1
    assert took < LOST_AFTER + 2 * KEEPALIVE + 5
    assert "connection lost" in out and "fab status --hosts gpu2" in out
    assert out.splitlines()[-2].split()[:3] == ["gpu1", "0.5.9", "pristine"]


def test_a_killed_host_ends_the_task_in_bounded_time(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(pair[1], specgate_python=slow(60, pair[1]))
    process = start("preflight", "--inventory", there)
    runs_slowly(pair[1])
    pair[1].kill()
    try:
        out, _ = process.communicate(timeout=LOST_AFTER + 2 * KEEPALIVE + 30)
    finally:
        pair[1].start()
    assert process.returncode == 1 and "connection lost" in out


def test_interrupted_by_the_operator(pair: list[Reached], inventory: Inventory) -> None:
    process = start("preflight", "--inventory", inventory(*pair, specgate_python=slow(60, *pair)))
    runs_slowly(pair[0])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode != 0
    for host in pair:  # what runs there would have ended by itself
        host.sudo("pkill -f '[s]pecgate.pyz'", check=False)


def test_nothing_is_left_on_the_host(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(pair[0])
    assert fab("patch", "--inventory", there).code == 0
    stamp = "/run/before"
    pair[0].sudo(f"touch {stamp}")
    for task in ("preflight", "verify", "status", "history"):
        assert fab(task, "--inventory", there).code == 0
    made = (
        pair[0]
        .sudo(
            f"find / -xdev -newer {stamp} -type f -not -path '/var/log/*' -not -path '/run/*'; "
            f"find /tmp /var/tmp /dev/shm /run/user {STORE} -newer {stamp} -type f"
        )
        .stdout
    )
    assert made == ""
    assert "specgate" not in pair[0].sudo("ps -eo args").stdout


def test_history_is_one_story(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(*pair)
    assert fab("patch", "--inventory", there, USER="alice").code == 0
    assert fab("rollback", "--inventory", there, "--hosts", "gpu2", USER="bob").code == 0
    told = fab("history", "--inventory", there, "--json").hosts
    one, two = told["gpu1"]["history"], told["gpu2"]["history"]
    assert [(entry["operation"], entry["actor"]) for entry in one] == [("apply", "alice")]
    assert [(entry["operation"], entry["actor"]) for entry in two] == [
        ("apply", "alice"),
        ("rollback", "bob"),
    ]
    assert one[0]["run_id"] == two[0]["run_id"] != two[1]["run_id"]
    on_disk = [json.loads(line) for line in pair[1].read(f"{STORE}/audit.jsonl").splitlines()]
    assert [entry["run_id"] for entry in on_disk] == [entry["run_id"] for entry in two]
    rows = [line.split() for line in fab("history", "--inventory", there).out.splitlines() if "alice" in line]
    assert len(rows) == 2


def unit(host: Reached, name: str, command: str, kind: str = "exec") -> None:
    """Make a server's unit that runs a shell command."""
    limit = "StartLimitIntervalSec=600\nStartLimitBurst=2"  # which a rollback's restart must not run into
    text = f"[Unit]\n{limit}\n[Service]\nType={kind}\nExecStart=/bin/sh -c {shlex.quote(command)}\n"
    host.put(f"/etc/systemd/system/sglang@{name}.service", text.encode())


def pid(host: Reached, name: str) -> str:
    return host.run(f"systemctl show -P MainPID sglang@{name}").stdout.strip()


@pytest.fixture
def servers(pair: list[Reached]):
    """A unit that runs and one that is stopped, on the first host."""
    host = pair[0]
    unit(host, "runs", "echo \"ServerArgs(api_key='top secret', port=1)\"; exec sleep 1000")
    unit(host, "rests", "exec sleep 1000")
    host.sudo("systemctl daemon-reload; systemctl start sglang@runs")
    yield host
    host.sudo(
        "systemctl stop 'sglang@*'; rm /etc/systemd/system/sglang@*; systemctl daemon-reload", check=False
    )
    host.sudo("systemctl reset-failed", check=False)


def test_rollback_restarts_what_ran_and_only_if_something_changed(
    servers: Reached, inventory: Inventory
) -> None:
    there, before = inventory(servers), pid(servers, "runs")
    patched = fab("patch", "--inventory", there)
    assert "sglang@runs.service still serves the code from before" in patched.out
    assert (patched.code, pid(servers, "runs")) == (0, before)
    dry = fab("rollback", "--dry-run", "--inventory", there, "--json").hosts["gpu1"]
    assert dry["restarted"] == ["sglang@runs.service"] and pid(servers, "runs") == before
    done = fab("rollback", "--inventory", there, "--json")
    assert (done.code, done.hosts["gpu1"]["restarted"]) == (0, ["sglang@runs.service"])
    after = pid(servers, "runs")
    assert after not in (before, "0") and pid(servers, "rests") == "0"
    assert fab("rollback", "--inventory", there).code == 0
    assert pid(servers, "runs") == after
    servers.assert_pristine()


def test_rollback_restarts_what_an_interrupted_one_left(servers: Reached, inventory: Inventory) -> None:
    there = inventory(servers)
    assert fab("patch", "--inventory", there).code == 0
    assert "old code: runs" in fab("status", "--inventory", there).out
    servers.sudo("systemctl restart sglang@runs")
    assert "old code" not in fab("status", "--inventory", there).out
    before = pid(servers, "runs")
    (host,) = load(there)
    with remote.session(host) as here:  # all but the restart
        assert remote.engine(here, ["rollback", "--root", SITE])["changed"]
    ran = fab("rollback", "--inventory", there, "--json").hosts["gpu1"]
    assert (ran["changed"], ran["restarted"]) == (False, ["sglang@runs.service"])
    assert pid(servers, "runs") not in (before, "0")


def test_rollback_fails_when_a_server_does_not_come_back(servers: Reached, inventory: Inventory) -> None:
    there = inventory(servers)
    assert fab("patch", "--inventory", there).code == 0
    unit(servers, "runs", "echo no memory left >&2; exit 1")
    servers.sudo(
        "sed -i s/Type=exec/Type=oneshot/ /etc/systemd/system/sglang@runs.service; systemctl daemon-reload"
    )
    ran = fab("rollback", "--inventory", there)
    assert ran.code == 1
    assert "the files are pristine, but sglang@runs.service does not serve" in ran.out
    assert "no memory left" in ran.out
    servers.assert_pristine()


def test_status_and_logs_show_servers_without_secrets(servers: Reached, inventory: Inventory) -> None:
    there = inventory(servers)
    status = fab("status", "--inventory", there)
    assert status.code == 0 and "active: runs" in status.out
    logs = fab("logs", "--inventory", there, "--unit", "runs")
    assert "api_key=***, port=1" in logs.out and "secret" not in logs.out + logs.err
    assert "top secret" in servers.sudo("journalctl -u sglang@runs").stdout  # so there was one to hide


def test_status_tells_drift(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(*pair)
    assert fab("patch", "--inventory", there).code == 0
    pair[0].sudo(f"echo '# a hand was here' >> {SERVER_ARGS}")
    edited = pair[0].sha256(SERVER_ARGS)
    ran = fab("status", "--inventory", there)
    assert ran.code == 1 and "drifted" in ran.out
    verified = fab("verify", "--inventory", there, "--json")
    assert (verified.code, verified.hosts["gpu2"]["outcome"]) == (1, "passed")
    assert fab("rollback", "--inventory", there).code == 0
    pair[0].assert_pristine()
    kept = pair[0].sudo(f"find {STORE} -type f -exec sha256sum {{}} +").stdout
    assert edited in kept  # nothing is lost


def test_a_lost_store_is_told_and_nothing_is_taken_back(pair: list[Reached], inventory: Inventory) -> None:
    there = inventory(pair[0])
    assert fab("patch", "--inventory", there).code == 0
    pair[0].sudo(f"rm -rf {STORE}")
    before = trees(pair[0], SITE + "/sglang/srt")
    for task in ("status", "rollback"):
        ran = fab(task, "--inventory", there)
        assert ran.code == 1
        assert "not those of RECORD" in ran.out and "has no backup" in ran.out
        assert "pip install --force-reinstall --no-deps sglang==0.5.9" in ran.out
        assert "drifted" in ran.out.splitlines()[-1]
    assert trees(pair[0], SITE + "/sglang/srt") == before


def test_a_changed_bundle_is_refused_on_the_host(
    pair: list[Reached], inventory: Inventory, tmp_path: Path
) -> None:
    path = tmp_path / "b.json"
    assert fab("bundle", "--out", str(path)).code == 0
    path.write_text(path.read_text().replace("always speculate", "never speculate"))
    before = trees(pair[0], SITE + "/sglang/srt")
    ran = fab("patch", "--patch", str(path), "--inventory", inventory(pair[0]), "--json")
    assert (ran.code, ran.hosts["gpu1"]["outcome"]) == (1, "refused")
    assert trees(pair[0], SITE + "/sglang/srt") == before


def test_a_deploy_that_fails_keeps_its_exit_code(pair: list[Reached], inventory: Inventory) -> None:
    failed = fab("deploy", "--inventory", inventory(pair[0], specgate_python="/opt/nowhere/bin/python"))
    assert failed.code == 2, failed.out
    assert "/opt/nowhere/bin/python" in failed.out
