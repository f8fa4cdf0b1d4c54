"""A host that serves a real SGLang on the CPU, as the roles put it there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ansible.conftest import Ran, play
from tests.conftest import Reached

UNIT = "sglang@main.service"
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
ARGUMENTS = {
    "device": "cpu",
    "disable-radix-cache": True,
    "mem-fraction-static": 0.1,
    "max-total-tokens": 4096,
    "sleep-on-idle": True,  # SGLang's scheduler polls otherwise, and takes a core
}
EAGLE3 = {
    "prefill-attention-backend": "intel_amx",
    "decode-attention-backend": "intel_amx",
    "speculative-algorithm": "EAGLE3",
    "speculative-draft-model-path": "/opt/models/llama-eagle3",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}


def probe(host: Reached, *gates: str, options: str = "") -> dict[str, Any]:
    """Ask the server named main on its host; return the engine's document."""
    command = (
        f"python3 /usr/local/lib/specgate/specgate.pyz probe --json --unit {UNIT} {options} {' '.join(gates)}"
    )
    document: dict[str, Any] = json.loads(host.sudo(command, check=False, timeout=600).stdout)
    print(json.dumps(document["gates"], indent=1))
    return document


def curl(host: Reached, path: str, options: str = "") -> str:
    """Return what curl prints, asking the server named main on its host."""
    return host.run(f"curl -s {options} http://127.0.0.1:30000{path}").stdout


@dataclass
class Served:
    """One host, one server named main, and the variables of its inventory."""

    host: Reached
    folder: Path
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def instance(self) -> dict[str, Any]:
        """The server's entry; change it, then ``play``."""
        entry: dict[str, Any] = self.variables["sglang_server_instances"][0]
        return entry

    def play(self, *roles: str, arguments: tuple[str, ...] = (), **extra: Any) -> Ran:
        """Run roles on the host, as a playbook of a user would."""
        inventory, playbook = self.inventory(), self.folder / "play.yml"
        playbook.write_text(
            yaml.safe_dump([{"name": "Test", "hosts": "gpu", "gather_facts": False, "roles": list(roles)}])
        )
        return play(str(playbook), inventory, *arguments, timeout=800, **extra)

    def inventory(self) -> Path:
        """Write the inventory of the host and return its path."""
        variables = {**self.host.host.fleet.variables, **self.variables}
        hosts = {self.host.name: {"ansible_host": self.host.address}}
        inventory = self.folder / "hosts.yml"
        inventory.write_text(yaml.safe_dump({"gpu": {"hosts": hosts, "vars": variables}}))
        return inventory

    def bundle(self, document: dict[str, Any]) -> None:
        """Say which patch ``sglang_patch`` puts."""
        path = self.folder / "bundle.json"
        path.write_text(json.dumps(document))
        self.variables["specgate_patch"] = str(path)

    def probe(self, *gates: str, options: str = "") -> dict[str, Any]:
        """Ask the server on its host; return the document."""
        return probe(self.host, *gates, options=options)

    def curl(self, path: str, options: str = "") -> str:
        """Return what curl prints."""
        return curl(self.host, path, options)

    def journal(self) -> str:
        return self.host.sudo(f"journalctl -u {UNIT} -o cat --no-pager").stdout

    def show(self, name: str) -> str:
        return self.host.run(f"systemctl show -P {name} {UNIT}").stdout.strip()

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Reached, int, dict[str, Any]], Served]:
    """A function (host, threshold, arguments) that says what is to be served there; ``play`` starts it."""

    def make(host: Reached, threshold: int, arguments: dict[str, Any]) -> Served:
        instance = {
            "name": "main",
            "model": "/opt/models/llama",
            "port": 30000,
            "gpus": [],
            "speculative_disable_batch_threshold": threshold,
            "arguments": {**ARGUMENTS, **arguments},
            "environment": ENVIRONMENT,
        }
        variables = {
            "specgate_python": "/opt/sglang/bin/python",
            "specgate_environment": ENVIRONMENT,
            "sglang_server_start_seconds": 600,
            "sglang_server_free_seconds": 5,
            "sglang_server_instances": [instance],
        }
        return Served(host, tmp_path_factory.mktemp("serve"), variables)

    return make
