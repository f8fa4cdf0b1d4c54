"""What the tests of the Fabric front share: an inventory of test hosts, and ``fab`` itself as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.fleet import ROOT
from tests.conftest import Reached

FAB = Path(sys.executable).parent / "fab"


@dataclass(frozen=True)
class Ran:
    """How a ``fab`` ended."""

    code: int
    out: str
    err: str

    @property
    def hosts(self) -> dict[str, Any]:
        """The documents that ``--json`` printed, by host."""
        found: dict[str, Any] = json.loads(self.out)["hosts"]
        return found


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Start ``fab`` and return the process."""
    return subprocess.Popen(
        [FAB, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env={**os.environ, "USER": "operator", "COLUMNS": "80", **environment},
    )  # fmt: skip


def fab(*words: str, timeout: float = 300, **environment: str) -> Ran:
    """Run ``fab`` to its end."""
    process = start(*words, **environment)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Ran(process.returncode, out, err)


Inventory = Callable[..., str]


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    """A function (hosts…, by_host={name: variables}, variable=value…) that writes an inventory.

    It returns the path. The import gate costs half a minute: it runs with ``specgate_no_import=False`` only.
    """

    def write(*hosts: Reached, by_host: dict[str, dict[str, Any]] | None = None, **variables: Any) -> str:
        fleet = hosts[0].host.fleet
        common = {
            **fleet.variables,
            "specgate_no_import": True,
        }
        entries = {
            host.name: {"ansible_host": host.address, **(by_host or {}).get(host.name, {})} for host in hosts
        }
        file = tmp_path / "hosts.yml"
        file.write_text(yaml.safe_dump({"gpu": {"hosts": entries, "vars": {**common, **variables}}}))
        return str(file)

    return write


def logins(host: Reached) -> int:
    """How many logins sshd has accepted since the host started; to ask is one more, which is counted."""
    return int(host.sudo("journalctl -u ssh -o cat | grep -c '^Accepted publickey'").stdout)


def trees(host: Reached, *folders: str) -> str:
    """A listing of every file below some folders with its content's hash, owner, mode and times."""
    listing = "find {0} -exec stat -c '%n %s %u %g %a %Y %Z' {{}} + ; find {0} -type f -exec sha256sum {{}} +"
    return host.sudo(listing.format(" ".join(folders)) + " | sort", check=False).stdout
