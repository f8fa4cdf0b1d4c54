"""Test hosts on this machine: each a systemd in namespaces of its own, reached over SSH across a bridge.

Needs root on Linux. Several fleets stand side by side, each in its slot (SPECGATE_HOSTS_SLOT, 0 to 7): a slot
has its own bridge, its own 32 addresses of 198.51.100.0/24 and its own state folder.
SPECGATE_HOSTS_NET=198.51.100.0/24 gives one fleet all of them.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import disk

ROOT = Path(__file__).resolve().parents[2]
INIT = Path(__file__).with_name("init.sh")
DELAY = Path(__file__).with_name("delay.py")
GUARD = ["ip", "route", "replace", "unreachable", "198.51.100.0/24", "metric", "4278198272"]
CGROUPS = Path("/sys/fs/cgroup")
# a host's systemd takes about eight; the kernel's own 128 for a user would end at fifteen hosts
INOTIFY, INOTIFY_INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances"), 1024
STATE_SIZE = "6g"  # of memory, at most, for the disks of all hosts of a slot
APART = ("--mount", "--pid", "--uts", "--ipc", "--cgroup")  # the network namespace has a name, for ip
TOOLS = ("ip", "ss", "sshd", "ssh", "ssh-keygen", "nsenter", "unshare", "setpriv", "mount")
SLOTS = tuple("01234567")


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
        given = os.environ.get("SPECGATE_HOSTS_SLOT", "0")
        if given not in SLOTS:
            raise HostError(f"SPECGATE_HOSTS_SLOT is {given}; it must be 0 to 7")
        slot = int(given)
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
    def variables(self) -> dict[str, str]:
        """Ansible's variables for all hosts: how the user ``deploy`` reaches them."""
        return {
            "ansible_user": disk.USER,
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": f"-F /dev/null -o UserKnownHostsFile={self.known_hosts}",
        }

    @property
    def hosts(self) -> list[Host]:
        """The hosts that have a disk, running or not, by number."""
        found = (Host(self, path.parent.name) for path in self.state.glob("*/host.json"))
        return sorted(found, key=lambda host: host.number)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One command at a time changes a slot's network and numbers."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        with self.state.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def check_machine(self) -> None:
        """HostError when test hosts cannot stand here; says what to do."""
        if sys.platform != "linux":
            raise HostError(f"test hosts need Linux (namespaces, systemd); this is {sys.platform}")
        if os.geteuid() != 0:
            raise HostError("test hosts need root (namespaces, mounts); run this as root")
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        if missing := [tool for tool in TOOLS if not shutil.which(tool, path=path)]:
            raise HostError(f"missing here: {', '.join(missing)}; run tests/hosts/install")

    def network_up(self) -> None:
        """Guard route, bridge, state folder in memory and the user's key; what stands already stays."""
        self.check_machine()
        run(*GUARD)  # first: no packet for a host that is down may take the default route
        if int(INOTIFY.read_text()) < INOTIFY_INSTANCES:
            INOTIFY.write_text(str(INOTIFY_INSTANCES))
        if not Path("/sys/class/net", self.bridge).exists():
            run("ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
            run("ip", "addr", "add", f"{self.net[1]}/{self.net.prefixlen}", "dev", self.bridge)
            run("ip", "link", "set", self.bridge, "up")
        self.state.mkdir(parents=True, exist_ok=True)
        if not self.state.is_mount():
            size = f"mode=755,size={STATE_SIZE}"
            run("mount", "-t", "tmpfs", "-o", size, "specgate-hosts", str(self.state))
        if not self.key.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "deploy", "-f", str(self.key))

    def network_down(self) -> None:
        """Take bridge and state away, and whatever a run that was killed left of this slot.

        The guard route stays, for sockets that still talk to dead hosts.
        """
        for name in self._strays():
            Host(self, name).kill()
        run("ss", "-K", "dst", str(self.net), check=False)
        for link in Path("/sys/class/net").glob(f"{self.bridge}*"):
            run("ip", "link", "del", link.name, check=False)
        if self.state.is_mount():
            run("umount", str(self.state))
            self.state.rmdir()
        netns = Path("/run/netns")
        if netns.is_mount() and not any(netns.iterdir()):
            run("umount", str(netns), check=False)

    def _strays(self) -> set[str]:
        """Names of hosts of which a namespace or control group stands, whether or not they have a disk."""
        found = Path("/run/netns").glob(f"{self.bridge}-*")
        names = {path.name.removeprefix(f"{self.bridge}-") for path in found}
        groups = (path for root in cgroup_roots() for path in root.glob(f"specgate-{self.bridge}-*"))
        return names | {path.name.removeprefix(f"specgate-{self.bridge}-") for path in groups}

    def leftovers(self) -> list[str]:
        """What still stands of this slot: nothing after ``down --all``."""
        found = [f"link {p.name}" for p in Path("/sys/class/net").glob(f"{self.bridge}*")]
        found += [f"namespace or control group of {name}" for name in sorted(self._strays())]
        mounts = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
        found += [f"mount {m}" for m in mounts if Path(m) == self.state or self.state in Path(m).parents]
        found += [f"process {pid}" for pid in _processes(str(INIT), str(self.state))]
        found += [f"process {pid}" for pid in _processes(str(DELAY), self.bridge)]
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

    @property
    def runs(self) -> bool:
        """Whether the host has power."""
        return bool(_processes(str(INIT), str(self.dir)))

    @property
    def _groups(self) -> list[Path]:
        return [root / f"specgate-{self._namespace}" for root in cgroup_roots()]

    def create(
        self,
        sglang: Path | None = None,
        models: Path | None = None,
        store_size: str = "",
        memory: str = "",
        pids: str = "",
    ) -> None:
        """Make the host's disk.

        ``sglang`` is the environment to see at /opt/sglang, ``models`` the folder at /opt/models.
        ``store_size`` (2m) limits /var/lib/specgate; ``memory`` (4g, what is written to the disk counts) and
        ``pids`` limit the host.
        """
        if not re.fullmatch("[a-z][a-z0-9-]{0,30}", self.name):
            raise HostError(f"{self.name!r} is no host name: lower-case letters, digits and dashes")
        if self.dir.exists():  # of a run that was killed before the disk was complete
            shutil.rmtree(self.dir)
        taken = {host.number for host in self.fleet.hosts}
        number = next(n for n in range(1, self.fleet.net.num_addresses) if n not in taken)
        if 10 + number >= self.fleet.net.num_addresses - 1:
            raise HostError(f"{self.fleet.net} has no address left for {self.name}")
        for layer in ("up", "work", "root", "sglang-up", "sglang-work"):
            (self.dir / layer).mkdir(parents=True)
        key = disk.prepare(self.dir / "up", self.name, self.fleet.key.with_suffix(".pub").read_text())
        given = {"SGLANG": sglang, "MODELS": models, "STORE_SIZE": store_size, "memory": memory, "pids": pids}
        self._save({name: str(value or "") for name, value in given.items()} | {"number": str(number)})
        self._forget_key()
        with self.fleet.known_hosts.open("a") as known:
            known.write(f"{self.address} {key}\n")

    def _save(self, settings: dict[str, str]) -> None:
        new = self.dir / "host.json.new"
        new.write_text(json.dumps(settings))
        new.rename(self.dir / "host.json")

    def start(self) -> None:
        """Power on: namespaces, veth, control groups, systemd."""
        if self.runs:
            raise HostError(f"{self.name} runs already")
        self.kill()  # what a reboot from inside, or a start that was killed, left
        space, link, address, settings = self._namespace, self._link, self.address, self.settings
        mac = "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        run("ip", "netns", "add", space)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "address", mac, "netns", space)
        run("ip", "link", "set", link, "master", self.fleet.bridge, "up")
        run("ip", "-n", space, "addr", "add", f"{address}/{self.fleet.net.prefixlen}", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        if delay := float(settings.get("latency", 0)):
            self._slow_down(delay)
        memory, pids = settings.get("memory", ""), settings.get("pids", "")
        limits = {"memory.limit_in_bytes": memory, "memory.max": memory, "pids.max": pids}
        for group in self._groups:
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if group.parent.name == "cpuset":
                    (group / file).write_text((group.parent / file).read_text())
            if group.parent.name == "devices":
                (group / "devices.deny").write_text("b *:* rwm")  # no raw disks
            for file, limit in limits.items():
                if limit and (group / file).exists():
                    (group / file).write_text(limit)
        groups = self._groups

        def enter() -> None:
            # the shell must start inside its groups: they become the roots of its cgroup namespace
            for group in groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        with (self.dir / "console.log").open("w") as console:
            subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{space}", "unshare", *APART, "--fork", "--kill-child",
                 "--propagation", "private", "bash", str(INIT), self.name, str(self.dir)],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
                preexec_fn=enter, env={**os.environ, **settings},
            )  # fmt: skip

    def kill(self) -> None:
        """Pull the plug: all processes and mounts of the host vanish at once. The disk stays."""
        for pid in _processes(str(INIT), str(self.dir)):  # the wrapper, which takes PID 1 with it
            _kill(pid)
        end = time.monotonic() + 10
        while (left := [group for group in self._groups if not _removed(group)]) and time.monotonic() < end:
            time.sleep(0.02)
            for group in left:
                for member in (group / "cgroup.procs").read_text().split():
                    _kill(int(member))
        if (self.dir / "host.json").exists():
            self._full_speed()
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
        self._save(self.settings | {"latency": str(milliseconds)})
        self._full_speed()
        if milliseconds:
            self._slow_down(milliseconds)

    def _slow_down(self, milliseconds: float) -> None:
        """Put a relay between the host's link and the bridge: not every kernel has tc's netem."""
        own, near, far = (self._link + end for end in "bno")
        run("ip", "link", "add", own, "type", "bridge", "forward_delay", "0")
        run("ip", "link", "set", own, "up")
        relay = subprocess.Popen(
            [sys.executable, str(DELAY), near, far, str(milliseconds / 2)], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert relay.stdout is not None
        if not relay.stdout.readline():
            raise HostError(f"{self.name}: no relay for the latency; is there a /dev/net/tun?")
        for link, bridge in ((self._link, own), (near, own), (far, self.fleet.bridge)):
            run("ip", "link", "set", link, "master", bridge)
        for link in (near, far):
            run("ip", "link", "set", link, "up")

    def _full_speed(self) -> None:
        for pid in _processes(str(DELAY), self._link + "n"):
            _kill(pid)
        if Path("/sys/class/net", self._link + "b").exists():
            run("ip", "link", "set", self._link, "master", self.fleet.bridge)
            run("ip", "link", "del", self._link + "b")

    def ssh(self, *command: str, user: str = disk.USER) -> list[str]:
        """The ssh command line that runs ``command`` (joined by ssh, as ever) on the host; checks its key."""
        options = {
            "IdentitiesOnly": "yes", "BatchMode": "yes", "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": str(self.fleet.known_hosts), "LogLevel": "ERROR", "ConnectTimeout": "3",
        }  # fmt: skip
        given = [text for name, value in options.items() for text in ("-o", f"{name}={value}")]
        return [
            "ssh",
            "-F",
            "/dev/null",
            "-i",
            str(self.fleet.key),
            *given,
            f"{user}@{self.address}",
            *command,
        ]

    def wait(self, seconds: float = 60, degraded: bool = False) -> None:
        """Wait until systemd runs; HostError with the failed units (unless ``degraded`` will do) or the console."""
        end = time.monotonic() + seconds
        said = "no answer"
        while time.monotonic() < end:
            done = run(*self.ssh("systemctl is-system-running --wait"), check=False, timeout=seconds)
            said = done.stdout.strip() or done.stderr.strip()
            if said == "running" or (degraded and said == "degraded"):
                return
            if said == "degraded":
                failed = run(*self.ssh("systemctl --failed --no-legend --plain"), check=False).stdout.strip()
                raise HostError(f"{self.name}: systemd is degraded: {failed}")
            time.sleep(0.1)
        raise HostError(f"{self.name}: {said}; console: {(self.dir / 'console.log').read_text()[-500:]}")

    def remove(self) -> None:
        """Power off and forget the host, its disk and its key."""
        self.kill()
        run("ss", "-K", "dst", self.address, check=False)  # the next host here starts without old sockets
        self._forget_key()
        shutil.rmtree(self.dir)

    def _forget_key(self) -> None:
        known = self.fleet.known_hosts
        lines = known.read_text().splitlines(keepends=True) if known.exists() else []
        known.write_text("".join(line for line in lines if line.split()[0] != self.address))


def _processes(program: str, argument: str) -> list[int]:
    """Processes that have both among their arguments; a dead one that waits for its parent has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if program in arguments and argument in arguments:
            found.append(int(path.parent.name))
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _removed(group: Path) -> bool:
    """Try to remove a control group and its children; they stay busy for a moment after their processes.

    The host's systemd may be alive for that moment and remove some itself: os.walk passes over what is gone.
    """
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()
    return not group.exists()
