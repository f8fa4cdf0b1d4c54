"""What the tests of Ansible's front share: hosts with a small SGLang and server, and ``ansible-playbook``."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from tests.conftest import HostMaker, Reached
from tests.hosts import cli
from tests.unit.engine import mini

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = Path(sys.executable).parent / "ansible-playbook"
UNIT = "sglang@main.service"

# Serves as SGLang does, as far as the gates for health and configuration look, and without a model. Its flags
# are those of ServerArgs and its worker is EAGLEWorkerV2, both as they lie on the host: patched, or not. It logs
# its arguments and asks for the API key, as SGLang does.
SERVER = """\
import argparse, http.server, json, sys
from sglang.srt import server_args
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, said):
        key = getattr(args, "api_key", None)
        known = key is None or self.headers["Authorization"] == f"Bearer {key}"
        data = json.dumps(said).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        name = "speculative_disable_batch_threshold"
        threshold = {name: getattr(args, name)} if hasattr(args, name) else {}
        worker = {"batch_threshold": {"threshold": value} for value in threshold.values()}
        self.answer({"version": "0.5.9", **threshold, "internal_states": [{**threshold, **worker}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"output_ids": [1, 2, 3, 4], "meta_info": {"completion_tokens": 4}})

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    here, rest = parser.parse_known_args()
    args = server_args.prepare_server_args(rest)
    print("server_args =", args, flush=True)
    EAGLEWorkerV2(args)
    http.server.ThreadingHTTPServer((here.host, here.port), Handler).serve_forever()
"""
INSTANCE = {
    "name": "main",
    "model": "/opt/model",
    "port": 30000,
    "gpus": [],
    "speculative_disable_batch_threshold": 0,
}
_number = count(1)


@dataclass(frozen=True)
class Ran:
    """How an ``ansible-playbook`` ended: its exit code and all that it printed."""

    code: int
    out: str

    @property
    def words(self) -> str:
        """Return the output without its line breaks, which may stand anywhere."""
        return " ".join(self.out.split())

    @property
    def changed(self) -> int:
        """Return the number of hosts that the last line calls changed."""
        return int(re.findall(r"hosts?: changed=(\d+) failed=\d+", self.out)[-1])


def start(playbook: str, inventory: Path, output: IO[str], *more: str, **extra: Any) -> subprocess.Popen[str]:
    """Start a playbook, its output into a file; ``extra`` are variables for its command line."""
    command = [str(PLAYBOOK), str(ROOT / "playbooks" / playbook), "-i", str(inventory), *more]
    if extra:
        command += ["-e", json.dumps(extra)]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "COLUMNS": "80"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )


def play(playbook: str, inventory: Path, *more: str, timeout: float = 300, **extra: Any) -> Ran:
    """Run a playbook to its end."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = start(playbook, inventory, output, *more, **extra)
        try:
            process.wait(timeout)
        finally:
            process.kill()
            output.seek(0)
            said = output.read()
            print(said)
    return Ran(process.returncode, said)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The small SGLang, with the small server."""
    path = mini.wheel(tmp_path_factory.mktemp("wheel"), replace={"sglang/launch_server.py": SERVER})
    return path.read_bytes()


@pytest.fixture
def small_hosts(make_hosts: HostMaker, wheel: bytes) -> Iterator[Callable[[int], list[Reached]]]:
    """A function that brings up fresh hosts with the small SGLang in /opt/sglang. They go when the test is done."""
    made: list[Reached] = []

    def make(number: int) -> list[Reached]:
        hosts = make_hosts(*(f"ans{next(_number)}" for _ in range(number)), sglang="none")
        made.extend(hosts)
        for host in hosts:
            install(host, wheel)
        return hosts

    yield make
    if made:
        cli.take_down(made[0].host.fleet, [host.name for host in made])


@pytest.fixture
def pair(small_hosts: Callable[[int], list[Reached]]) -> list[Reached]:
    """Two fresh hosts with the small SGLang."""
    return small_hosts(2)


def install(host: Reached, wheel: bytes, folder: str = "/opt/sglang") -> None:
    """Make a virtual environment on the host and put the wheel into it."""
    path = shlex.quote(folder)
    host.put("/tmp/sglang.whl", wheel)
    host.sudo(f"mkdir -p /opt/model && python3 -m venv --without-pip {path}")
    host.sudo(f"python3 -m zipfile -e /tmp/sglang.whl {path}/lib/python3.11/site-packages")


@dataclass
class Fleet:
    """An inventory of test hosts, the first of which is the canary."""

    path: Path
    hosts: list[Reached]

    def write(
        self,
        *,
        address: dict[str, str] | None = None,
        by_host: dict[str, dict[str, Any]] | None = None,
        **variables: Any,
    ) -> Path:
        """Write the inventory and return its path.

        ``address`` gives other addresses than the true ones, ``by_host`` variables of single hosts.
        """
        fleet = self.hosts[0].host.fleet
        entries = {
            host.name: {
                "ansible_host": (address or {}).get(host.name, host.address),
                **(by_host or {}).get(host.name, {}),
            }
            for host in self.hosts
        }
        common = {
            **fleet.variables,
            "specgate_patch": str(self.path.with_name("bundle.json")),
            "specgate_lock_path": str(self.path.with_name("lock")),
            "specgate_actor": "operator",
            "sglang_health_gates": ["health", "configuration"],
            "sglang_server_start_seconds": 120,
            "sglang_server_instances": [],
        }
        inventory = {
            "gpu": {"hosts": entries, "vars": {**common, **variables}},
            "canary": {"hosts": {self.hosts[0].name: None}},
        }
        self.path.write_text(yaml.safe_dump(inventory, allow_unicode=True), encoding="utf-8")
        return self.path

    def bundle(self, document: dict[str, Any]) -> None:
        """Say which bundle is deployed."""
        self.path.with_name("bundle.json").write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def fleet_of(tmp_path: Path) -> Iterator[Callable[[list[Reached]], Fleet]]:
    """A function that makes a Fleet of hosts, with the ordinary bundle."""

    def make(hosts: list[Reached]) -> Fleet:
        made = Fleet(tmp_path / "hosts.yml", hosts)
        made.bundle(mini.bundle())
        made.write()
        return made

    yield make


def tree(host: Reached, *folders: str) -> str:
    """Return every file below the folders with hash, mode, owner, size and time, as GNU tools see them."""
    where = " ".join(
        shlex.quote(folder) for folder in folders or ("/opt", "/var/lib/specgate", "/etc", "/usr/local")
    )
    listing = f"find {where} -xdev -exec stat -c '%n %s %u %g %a %Y' {{}} + ; "
    listing += f"find {where} -xdev -type f -exec sha256sum {{}} +"
    return "\n".join(sorted(host.sudo(listing, check=False).stdout.splitlines()))


def main_pid(host: Reached, unit: str = UNIT) -> int:
    """Return the unit's main process; 0 when it does not run."""
    return int(host.sudo(f"systemctl show -P MainPID {unit}").stdout)
