"""The test hosts themselves: what the other tests take for granted about power, network, disks and clearing up."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import HostMaker, Reached
from tests.hosts import cli
from tests.hosts.machine import ROOT, Fleet, Host, HostError

pytestmark = pytest.mark.hosts
TESTHOST = str(ROOT / "tests/hosts/testhost")
SERVER_ARGS = "/opt/sglang/lib/python3.11/site-packages/sglang/srt/server_args.py"


@pytest.fixture(scope="module")
def bare(make_hosts: HostMaker) -> Reached:
    """A host without SGLang."""
    return make_hosts("bare", sglang="none")[0]


def test_systemd_runs_and_the_user_is_an_ordinary_one(bare: Reached) -> None:
    assert bare.run("cat /proc/1/comm; hostname; id -un; sudo -n id -un").stdout.split() == [
        "systemd", "bare", "deploy", "root",
    ]  # fmt: skip
    assert bare.run("systemctl --failed --no-legend").stdout == ""


def test_root_does_not_log_in(bare: Reached) -> None:
    done = subprocess.run(bare.host.ssh("true", user="root"), capture_output=True, text=True)
    assert done.returncode == 255
    assert "Permission denied" in done.stderr


def test_another_host_key_is_refused(bare: Reached) -> None:
    known = bare.host.fleet.known_hosts
    right = known.read_text()
    try:
        for wrong in ("", f"{bare.address} {bare.host.fleet.key.with_suffix('.pub').read_text()}"):
            known.write_text(wrong)
            assert "Host key verification failed" in bare.run("true", check=False).stderr
    finally:
        known.write_text(right)
    bare.run("true")


def test_a_host_sees_nothing_of_the_machine_but_the_system(bare: Reached) -> None:
    assert bare.run("ls /home").stdout.split() == ["deploy"]
    assert bare.sudo("find /root /opt/models -type f").stdout == ""
    assert bare.sudo(f"test -e {ROOT} || test -e {sys.prefix}", check=False).returncode == 1
    assert bare.run("ls /dev/vd* /dev/sd* /dev/nvme*", check=False).stdout == ""


def test_cut_and_heal(bare: Reached) -> None:
    bare.cut()
    try:
        with pytest.raises(OSError, match=r"timed out|No route"):
            socket.create_connection((bare.address, 22), timeout=1)
    finally:
        bare.heal()
    bare.run("true")


def test_pulling_the_plug_keeps_the_disk_and_nothing_else(bare: Reached) -> None:
    bare.sudo("echo kept > /etc/kept; echo lost > /run/lost; sync")
    before = bare.run("stat -c %Y /proc/1").stdout
    bare.sudo("systemd-run -q --unit sleeper sleep 1000")
    bare.kill()
    with pytest.raises(OSError, match=r"timed out|No route|unreachable"):
        socket.create_connection((bare.address, 22), timeout=1)
    time.sleep(1.1)
    bare.start()
    assert bare.read("/etc/kept") == "kept\n"
    assert bare.run("ls /run/lost; systemctl is-active sleeper", check=False).stdout == "inactive\n"
    assert bare.run("stat -c %Y /proc/1").stdout != before


def test_a_reboot_from_inside_needs_a_start(bare: Reached) -> None:
    bare.run("sudo -n systemctl reboot --force --force", check=False)
    end = time.monotonic() + 20
    while bare.host.runs and time.monotonic() < end:
        time.sleep(0.1)
    assert not bare.host.runs
    cli.bring_up(bare.host.fleet, ["bare"])
    bare.run("true")


def test_latency(bare: Reached) -> None:
    def connects() -> float:
        """Fastest of five, in ms: other processes can only make it slower."""
        times = []
        for _ in range(5):
            start = time.monotonic()
            socket.create_connection((bare.address, 22)).close()
            times.append((time.monotonic() - start) * 1000)
        return min(times)

    near = connects()
    bare.host.latency(80)
    assert 80 <= connects() < near + 140
    assert len(bare.run("head -c 3000000 /dev/zero").stdout) == 3_000_000
    bare.host.latency(0)
    assert connects() < 80
    assert not list(Path("/sys/class/net").glob(f"{bare.host.fleet.bridge}-*[a-z]"))


def test_limits(make_hosts: HostMaker) -> None:
    fleet = Fleet.here()
    (host,) = map(Reached, cli.bring_up(fleet, ["small"], "none", store_size="2m", memory="300m", pids="300"))
    try:
        full = host.sudo("head -c 5000000 /dev/zero > /var/lib/specgate/x", check=False)
        assert "No space left on device" in full.stderr
        hog = "systemd-run -q --wait --collect -p OOMScoreAdjust=1000 python3 -c 'bytearray({} << 20)'"
        assert host.sudo(hog.format(100)).returncode == 0
        assert host.sudo(hog.format(400), check=False).returncode != 0
        swarm = "for i in $(seq 400); do sleep 5 & done"
        assert "Resource temporarily unavailable" in host.run(swarm, check=False).stderr
    finally:
        cli.take_down(fleet, ["small"])


def test_each_host_has_its_own_sglang(make_hosts: HostMaker, sglang: Callable[[str], Path]) -> None:
    one, other = make_hosts("one", "other")
    shared = sglang("0.5.9") / SERVER_ARGS.removeprefix("/opt/sglang/")
    pristine = shared.read_bytes()
    one.sudo(f"echo '# mine' >> {SERVER_ARGS}")
    assert one.read_bytes(SERVER_ARGS) == pristine + b"# mine\n"
    assert other.read_bytes(SERVER_ARGS) == shared.read_bytes() == pristine
    one.kill()
    one.start()
    assert one.read_bytes(SERVER_ARGS) == pristine + b"# mine\n"
    assert "Read-only" in one.sudo("touch /opt/models/x", check=False).stderr


@pytest.mark.parametrize("seconds", [0.2, 0.5, 0.8, 1.2, 2.0])
def test_a_run_that_was_killed_is_cleared(fleet: Fleet, seconds: float) -> None:
    up = [TESTHOST, "up", "half", "--sglang", "none"]
    killed = subprocess.Popen(up, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        killed.wait(seconds)
    except subprocess.TimeoutExpired:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    subprocess.run(up, check=True)
    host = Host(fleet, "half")
    assert subprocess.run(host.ssh("hostname"), capture_output=True, text=True).stdout == "half\n"
    assert any("half" in left for left in fleet.leftovers())
    subprocess.run([TESTHOST, "down", "half"], check=True)
    assert not any("half" in left for left in fleet.leftovers())


def test_wrong_use_is_one_line(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", "no/name", "--sglang", "none"]) == 1
    assert cli.main(["kill", "nobody"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "no host name" in said[0] and "no host nobody" in said[1]
    monkeypatch.setenv("SPECGATE_HOSTS_SLOT", "9")
    with pytest.raises(HostError, match="must be 0 to 7"):
        Fleet.here()
