"""Fixtures that all tests share: real test hosts, and real SGLang environments on the CPU."""

from __future__ import annotations

import base64
import csv
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts import cli, sglang_env
from tests.hosts.machine import Fleet, Host

# Each worker of pytest-xdist has a slot of test hosts, from 1 on: slot 0 is the demo's and the user's.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
os.environ["SPECGATE_HOSTS_SLOT"] = str(int(os.environ.get("SPECGATE_HOSTS_SLOT", "1")) + _worker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that start real servers, then those that need hosts: at the end they would run alone."""

    def rank(item: pytest.Item) -> int:
        return 0 if item.get_closest_marker("live") else 1 if item.get_closest_marker("hosts") else 2

    first: dict[Path, int] = {}
    for item in items:
        first[item.path] = min(first.get(item.path, 2), rank(item))
    items.sort(key=lambda item: first[item.path])


# a run in the background begins with this signal ignored, and so would every program that the tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)


# where a test host has its SGLang
SITE = "/opt/sglang/lib/python3.11/site-packages"


@dataclass(frozen=True)
class Reached:
    """A standing test host, as its operator sees it: over SSH, as an ordinary user, with sudo."""

    host: Host

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def address(self) -> str:
        return self.host.address

    def run(
        self, command: str, check: bool = True, timeout: float = 120, data: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command as ``deploy``; AssertionError with its output when it fails and ``check`` is set."""
        done = subprocess.run(self.host.ssh(command), capture_output=True, input=data, timeout=timeout)
        text = subprocess.CompletedProcess(
            command, done.returncode, done.stdout.decode(), done.stderr.decode()
        )
        assert not check or text.returncode == 0, (
            f"{self.name}: {command}: {text.returncode}\n{text.stdout}{text.stderr}"
        )
        return text

    def sudo(
        self, command: str, check: bool = True, timeout: float = 120, data: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command as root."""
        return self.run(f"sudo -n sh -c {shlex.quote(command)}", check, timeout, data)

    def put(self, path: str, data: bytes, mode: str = "644") -> None:
        """Write a file as root."""
        self.sudo(f"umask 077; cat > {shlex.quote(path)} && chmod {mode} {shlex.quote(path)}", data=data)

    def read(self, path: str) -> str:
        return self.sudo(f"cat {shlex.quote(path)}").stdout

    def read_bytes(self, path: str) -> bytes:
        command = f"sudo -n cat {shlex.quote(path)}"
        return subprocess.run(self.host.ssh(command), capture_output=True, check=True, timeout=120).stdout

    def sha256(self, path: str) -> str:
        """What GNU sha256sum says of a file."""
        return self.sudo(f"sha256sum {shlex.quote(path)}").stdout.split()[0]

    def recorded(self, site: str = SITE) -> dict[str, str]:
        """The sha256 in hex of each of SGLang's files, as the wheel's RECORD has it."""
        rows = csv.reader(self.sudo(f"cat {shlex.quote(site)}/sglang-*.dist-info/RECORD").stdout.splitlines())
        return {
            name: base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=").hex()
            for name, digest, _ in rows
            if digest and name.startswith("sglang/")
        }

    def assert_pristine(self, site: str = SITE) -> None:
        """Assert with GNU sha256sum that SGLang's files are what RECORD says, and that none is new."""
        listing = "find sglang -type f -not -name '*.pyc' -exec sha256sum {} +"
        found = self.sudo(f"cd {shlex.quote(site)} && {listing}").stdout
        assert {line[66:]: line[:64] for line in found.splitlines()} == self.recorded(site)

    def cut(self) -> None:
        self.host.cut()

    def heal(self) -> None:
        self.host.heal()

    def kill(self) -> None:
        """Pull the plug."""
        self.host.kill()

    def start(self) -> None:
        """Power on again and wait for systemd."""
        self.host.start()
        self.host.wait()


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """The slot's fleet, empty at first; whatever stands in it at the end is removed."""
    fleet = Fleet.here()
    fleet.check_machine()
    cli.take_down(fleet, [], everything=True)  # of a session that was killed
    yield fleet
    cli.take_down(fleet, [], everything=True)
    assert fleet.leftovers() == []


HostMaker = Callable[..., list[Reached]]


@pytest.fixture(scope="module")
def make_hosts(fleet: Fleet) -> Iterator[HostMaker]:
    """A function (names…, sglang="0.5.9", store_size="", memory="") that brings up fresh hosts.

    They go when the module's tests are done.
    """
    made: list[str] = []

    def make(*names: str, sglang: str = "0.5.9", store_size: str = "", memory: str = "") -> list[Reached]:
        made.extend(names)
        return [Reached(host) for host in cli.bring_up(fleet, list(names), sglang, store_size, memory)]

    yield make
    standing = {host.name for host in fleet.hosts}
    cli.take_down(fleet, [name for name in made if name in standing])


@pytest.fixture(scope="module")
def hosts(make_hosts: HostMaker) -> list[Reached]:
    """Two fresh hosts, gpu1 and gpu2, with SGLang 0.5.9."""
    return make_hosts("gpu1", "gpu2")


@pytest.fixture(scope="module")
def host(make_hosts: HostMaker) -> Reached:
    """One fresh host, gpu1, with SGLang 0.5.9."""
    return make_hosts("gpu1")[0]


@pytest.fixture(scope="session")
def sglang() -> Callable[[str], Path]:
    """A function that returns the environment (folder) of an SGLang version; it is shared: copy what you change."""
    return sglang_env.build
