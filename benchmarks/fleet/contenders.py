"""The ways to change a fleet that are measured. Each makes the same change, in the same four steps:

deploy    keep the pristine files, patch three files, look for the flag, compile; restart nothing
rerun     the same again: nothing is left to do
verify    look for the flag, compile
rollback  the pristine files again

None runs the import gate: SGLang's own import would be most of the time, and the same for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.machine import ROOT, Fleet, Host

STEPS = ("deploy", "rerun", "verify", "rollback")
TREE = "/srv/sglang"
PATHS = (
    "sglang/__init__.py",
    "sglang/srt/server_args.py",
    "sglang/srt/speculative/eagle_worker_v2.py",
)
HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Fixture:
    """What a series of measurements stands on."""

    fleet: Fleet
    hosts: list[Host]
    scratch: Path
    patched: Path
    bundle: Path


@dataclass
class Contender:
    """One way. ``command`` gives the command line of a step."""

    name: str
    command: Callable[[str], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    control: tempfile.TemporaryDirectory[str] | None = None

    def run(self, step: str) -> subprocess.CompletedProcess[str]:
        """Run a step to its end, over connections of its own."""
        self.control = tempfile.TemporaryDirectory(prefix="cp")
        environment = {**os.environ, **self.environment, "ANSIBLE_SSH_CONTROL_PATH_DIR": self.control.name}
        return subprocess.run(
            self.command(step),
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """End the connections that Ansible keeps open, so that no step finds them warm."""
        if self.control is None:
            return
        for socket in Path(self.control.name).iterdir():
            subprocess.run(["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "-"], capture_output=True)
        self.control.cleanup()


def contenders(fixture: Fixture, pyinfra: Path | None) -> list[Contender]:
    """Return all of them; pyinfra only where its command is given."""
    inventory = str(write_inventory(fixture))
    playbook = {"deploy": "deploy", "rerun": "deploy", "verify": "verify", "rollback": "rollback"}
    task = {"deploy": "patch", "rerun": "patch", "verify": "verify", "rollback": "rollback"}
    flag = {"deploy": "deploy", "rerun": "deploy", "verify": "verify", "rollback": "rollback"}
    destinations = [f"deploy@{host.address}" for host in fixture.hosts]
    ssh = [str(fixture.fleet.key), str(fixture.fleet.known_hosts), str(fixture.patched)]

    def plain(step: str) -> list[str]:
        words = [str(BIN / "ansible-playbook"), str(HERE / "plain" / "playbook.yml"), "-i", inventory]
        return [*words, "--tags", flag[step], "-e", f"patched={fixture.patched}", "-e", f"tree={TREE}"]

    def specgate(step: str) -> list[str]:
        # the batches are no variable of a host: Ansible reads them before it knows hosts
        words = [str(BIN / "ansible-playbook"), f"playbooks/{playbook[step]}.yml", "-i", inventory]
        return [*words, "-e", json.dumps({"specgate_batches": ["100%"]})]

    found = [
        Contender("Specgate, fab", lambda step: [str(BIN / "fab"), task[step], "--inventory", inventory]),
        Contender("Specgate, Ansible", specgate),
        Contender(
            "ssh loop",
            lambda step: ["bash", str(HERE / "plain" / "loop.sh"), "1", flag[step], *ssh, *destinations],
        ),
        Contender(
            "ssh loop, parallel",
            lambda step: ["bash", str(HERE / "plain" / "loop.sh"), "32", flag[step], *ssh, *destinations],
        ),
        Contender("Ansible tasks", plain, {"ANSIBLE_STDOUT_CALLBACK": "default"}),
    ]
    if pyinfra is not None:
        targets = fixture.scratch / "targets.py"
        data = {
            "ssh_user": "deploy",
            "ssh_key": str(fixture.fleet.key),
            "ssh_known_hosts_file": str(fixture.fleet.known_hosts),
            "ssh_strict_host_key_checking": "yes",
        }
        targets.write_text(f"hosts = {[(host.address, data) for host in fixture.hosts]!r}\n")
        found.append(
            Contender(
                "pyinfra",
                lambda step: [
                    str(pyinfra), "-y", "--parallel", "32", str(targets), str(HERE / "plain" / "change.py"),
                    "--data", f"step={flag[step]}",
                    "--data", f"patched={fixture.patched}", "--data", f"tree={TREE}",
                ],
            )
        )  # fmt: skip
    return found


def write_inventory(fixture: Fixture) -> Path:
    """Write the inventory that Ansible and Fabric share."""
    variables = {
        "ansible_user": "deploy",
        "ansible_become": True,
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_private_key_file": str(fixture.fleet.key),
        "ansible_ssh_common_args": "-F /dev/null -o IdentitiesOnly=yes "
        f"-o UserKnownHostsFile={fixture.fleet.known_hosts}",
        "specgate_root": TREE,
        "specgate_python": "",
        "specgate_no_import": True,
        "specgate_patch": str(fixture.bundle),
        "specgate_lock_path": str(fixture.scratch / "lock"),
        "sglang_server_instances": [],
    }
    hosts = {host.name: {"ansible_host": host.address} for host in fixture.hosts}
    file = fixture.scratch / "hosts.json"  # JSON is YAML
    file.write_text(json.dumps({"gpu": {"hosts": hosts, "vars": variables}}))
    return file.rename(file.with_suffix(".yml"))
