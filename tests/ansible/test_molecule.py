"""Every role's Molecule scenario: check on a bare host, converge, idempotence, verify."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
ROLES = sorted(path.parents[2] for path in (BIN.parents[1] / "roles").glob("*/molecule/default/molecule.yml"))

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_scenario(role: Path) -> None:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"}
    environment["SPECGATE_MOLECULE_SLOT"] = os.environ["SPECGATE_HOSTS_SLOT"]
    done = subprocess.run(
        ["molecule", "test"], cwd=role, env=environment, capture_output=True, text=True, timeout=850
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.returncode == 0
