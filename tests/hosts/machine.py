"""Test hosts on this machine: each a systemd in namespaces of its own, reached over SSH across a bridge.

Needs root on Linux. Several fleets stand side by side, each in its slot (SPECGATE_HOSTS_SLOT, 0 to 7): a slot has its own bridge,
its own 32 addresses of 198.51.100.0/24 and its own state folder. SPECGATE_HOSTS_NET=198.51.100.0/24 gives one fleet all of them.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import disk

ROOT = Path(__file__).resolve().parents[2]
INIT = Path(__file__).with_name("init.sh")
GUARD = ["ip", "route", "replace", "unreachable", "198.51.100.0/24", "metric", "4278198272"]
CGROUPS = Path("/sys/fs/cgroup")
STATE_SIZE = "6g"  # of memory, at most, for the disks of all hosts of a slot


class HostError(Exception):
    """A host could not be brought up, reached or taken away; the message says which and why."""


def run(*command: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command without a shell; HostError with its standard error when it fails and ``check`` is set."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
    )  # type: ignore[call-overload]
    if check and done.returncode:
        raise HostError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def cgroup_roots() -> list[Path]:
    """The hierarchies in which a host gets its group: one for cgroup 2, one a controller for version 1."""
    if run("stat", "-fc", "%T", str(CGROUPS)).stdout.strip() == "cgroup2fs":
        return [CGROUPS]
    return [path for path in sorted(CGROUPS.iterdir()) if path.is_dir()]


@dataclass(frozen=True)
class Fleet:
    """The hosts of one slot and what they share: bridge, state folder, keys."""

    slot: int
    net: ipaddress.IPv4Network
    state: Path

    @classmethod
    def here(cls) -> Fleet:
        """The fleet that the environment names: slot, addresses, state folder (SPECGATE_HOSTS)."""
        slot = int(os.environ.get("SPECGATE_HOSTS_SLOT", "0"))
        if not 0 <= slot <= 7:
            raise HostError(f"SPECGATE_HOSTS_SLOT is {slot}; it must be 0 to 7")
        net = ipaddress.IPv4Network(os.environ.get("SPECGATE_HOSTS_NET", f"198.51.100.{32 * slot}/27"))
        default = ROOT / ".cache" / ("hosts" if slot == 0 else f"hosts-{slot}")
        return cls(slot, net, Path(os.environ.get("SPECGATE_HOSTS", default)).resolve())

    @property
    def bridge(self) -> str:
        return f"sg{self.slot}"

    @property
    def key(self) -> Path:
        """Private key of the user ``deploy``."""
        return self.state / "id"

    @property
    def known_hosts(self) -> Path:
        """Host keys of all hosts, for strict checking."""
        return self.state / "known_hosts"

    @property
    def hosts(self) -> list[Host]:
        if not self.state.is_mount():
            return []
        return sorted((Host(self, path.parent.name) for path in self.state.glob("*/host.json")), key=lambda h: h.number)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One command at a time changes a slot's network and numbers."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        with open(self.state.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def network_up(self) -> None:
        """The guard route, the bridge, the state folder in memory and the user's key; what stands already stays."""
        if os.geteuid() != 0:
            raise HostError("test hosts need root (namespaces, mounts); run this as root")
        run(*GUARD)  # first: no packet for a host that is down may take the default route
        if not Path("/sys/class/net", self.bridge).exists():
            run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
            run("ip", "addr", "add", f"{self.net[1]}/{self.net.prefixlen}", "dev", self.bridge)
            run("ip", "link", "set", self.bridge, "up")
        self.state.mkdir(parents=True, exist_ok=True)
        if not self.state.is_mount():
            run("mount", "-t", "tmpfs", "-o", f"mode=755,size={STATE_SIZE}", "specgate-hosts", str(self.state))
        if not self.key.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "deploy", "-f", str(self.key))

    def network_down(self) -> None:
        """Take bridge and state away; the guard route stays, for sockets that still talk to dead hosts."""
        run("ss", "-K", "dst", str(self.net), check=False)
        run("ip", "link", "del", self.bridge, check=False)
        if self.state.is_mount():
            run("umount", str(self.state))
            self.state.rmdir()
        netns = Path("/run/netns")
        if netns.is_mount() and not any(netns.iterdir()):
            run("umount", str(netns), check=False)

    def leftovers(self) -> list[str]:
        """What still stands of this slot: nothing after ``down --all``."""
        found = [f"link {p.name}" for p in Path("/sys/class/net").glob(f"{self.bridge}*")]
        found += [f"namespace {p.name}" for p in Path("/run/netns").glob(f"{self.bridge}-*")]
        found += [f"cgroup {p}" for root in cgroup_roots() for p in root.glob(f"specgate-{self.bridge}-*")]
        mounts = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
        found += [f"mount {m}" for m in mounts if Path(m) == self.state or self.state in Path(m).parents]
        return found


@dataclass(frozen=True)
class Host:
    """One test host, by name. Its disk is a folder in the fleet's state."""

    fleet: Fleet
    name: str

    @property
    def dir(self) -> Path:
        return self.fleet.state / self.name

    @property
    def settings(self) -> dict[str, str]:
        loaded: dict[str, str] = json.loads((self.dir / "host.json").read_text())
        return loaded

    @property
    def number(self) -> int:
        return int(self.settings["number"])

    @property
    def address(self) -> str:
        return str(self.fleet.net[10 + self.number])

    @property
    def _namespace(self) -> str:
        return f"{self.fleet.bridge}-{self.name}"

    @property
    def _link(self) -> str:
        return f"{self.fleet.bridge}-{self.number}"

    def create(self, sglang: Path | None = None, models: Path | None = None, store_size: str = "") -> None:
        """Make the host's disk. ``sglang`` is the environment to see at /opt/sglang, ``store_size`` (2m) limits /var/lib/specgate."""
        taken = {host.number for host in self.fleet.hosts}
        number = next(n for n in range(1, self.fleet.net.num_addresses) if n not in taken)
        if 10 + number >= self.fleet.net.num_addresses - 1:
            raise HostError(f"{self.fleet.net} has no address left for {self.name}")
        for layer in ("up", "work", "root", "sglang-up", "sglang-work"):
            (self.dir / layer).mkdir(parents=True)
        settings = {"number": str(number), "SGLANG": str(sglang or ""), "MODELS": str(models or ""), "STORE_SIZE": store_size}
        key = disk.prepare(self.dir / "up", self.name, self.fleet.key.with_suffix(".pub").read_text())
        (self.dir / "host.json").write_text(json.dumps(settings))
        with self.fleet.known_hosts.open("a") as known:
            known.write(f"{self.address} {key}\n")

    def start(self) -> None:
        """Power on: namespaces, veth, control groups, systemd."""
        space, link, address = self._namespace, self._link, self.address
        mac = "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        run("ip", "netns", "add", space)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "address", mac, "netns", space)
        run("ip", "link", "set", link, "master", self.fleet.bridge, "up")
        run("ip", "-n", space, "addr", "add", f"{address}/{self.fleet.net.prefixlen}", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        groups = [root / f"specgate-{space}" for root in cgroup_roots()]
        for group in groups:
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if group.parent.name == "cpuset":
                    (group / file).write_text((group.parent / file).read_text())
            if group.parent.name == "devices":
                (group / "devices.deny").write_text("b *:* rwm")  # no raw disks

        def enter() -> None:  # the shell must start inside its groups: they become the roots of its cgroup namespace
            for group in groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        with (self.dir / "console.log").open("w") as console:
            wrapper = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork",
                 "--kill-child", "--propagation", "private", "bash", str(INIT), self.name, str(self.dir)],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True, preexec_fn=enter,
                env={**os.environ, **self.settings},
            )  # fmt: skip
        (self.dir / "pid").write_text(str(wrapper.pid))

    def kill(self) -> None:
        """Pull the plug: SIGKILL to the wrapper takes PID 1 with it, hence every process and mount. The disk stays."""
        pid = self.dir / "pid"
        if pid.exists():
            with_it = int(pid.read_text())
            try:
                if self.name.encode() in Path(f"/proc/{with_it}/cmdline").read_bytes():
                    os.kill(with_it, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                pass
            pid.unlink()
        groups = [root / f"specgate-{self._namespace}" for root in cgroup_roots()]
        end = time.monotonic() + 10
        while (left := [group for group in groups if not _removed(group)]) and time.monotonic() < end:
            time.sleep(0.02)
        run("ip", "link", "del", self._link, check=False)
        run("ip", "netns", "del", self._namespace, check=False)
        if left:
            raise HostError(f"{self.name}: processes are left in {left[0]}")

    def cut(self) -> None:
        """Partition: no packet passes until ``heal``."""
        run("ip", "link", "set", self._link, "down")

    def heal(self) -> None:
        run("ip", "link", "set", self._link, "up")

    def latency(self, milliseconds: float) -> None:
        """Add this round-trip time on the way to the host; 0 takes it away."""
        run("tc", "qdisc", "del", "dev", self._link, "root", check=False)
        if milliseconds:
            run("tc", "qdisc", "add", "dev", self._link, "root", "netem", "delay", f"{milliseconds}ms")

    def ssh(self, *command: str, user: str = disk.USER) -> list[str]:
        """The ssh command line that runs ``command`` (joined by ssh, as ever) on the host, its key checked."""
        return [
            "ssh", "-F", "/dev/null", "-i", str(self.fleet.key), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
            "-o", "StrictHostKeyChecking=yes", "-o", f"UserKnownHostsFile={self.fleet.known_hosts}", "-o", "LogLevel=ERROR",
            "-o", "ConnectTimeout=3", f"{user}@{self.address}", *command,
        ]  # fmt: skip

    def wait(self, seconds: float = 30) -> None:
        """Wait until systemd on the host says that it runs; HostError with its failed units or console when it does not."""
        end = time.monotonic() + seconds
        said = "no answer"
        while time.monotonic() < end:
            done = subprocess.run(
                self.ssh("systemctl is-system-running --wait"), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
            )
            said = done.stdout.strip() or done.stderr.strip()
            if said == "running":
                return
            if said == "degraded":
                failed = run(*self.ssh("systemctl --failed --no-legend --plain"), check=False).stdout.strip()
                raise HostError(f"{self.name}: systemd is degraded: {failed}")
            time.sleep(0.1)
        raise HostError(f"{self.name}: {said}; console: {(self.dir / 'console.log').read_text()[-500:]}")

    def remove(self) -> None:
        """Power off and forget the host, its disk and its key."""
        self.kill()
        known = self.fleet.known_hosts
        if known.exists():
            kept = [line for line in known.read_text().splitlines(keepends=True) if line.split()[0] != self.address]
            known.write_text("".join(kept))
        shutil.rmtree(self.dir)


def _removed(group: Path) -> bool:
    """Try to remove a control group and its children; they stay busy for a moment after their processes died."""
    if not group.exists():
        return True
    folders = sorted((p for p in group.rglob("*") if p.is_dir()), key=lambda p: len(p.parts), reverse=True)
    for folder in [*folders, group]:
        try:
            folder.rmdir()
        except OSError:
            return False
    return True
