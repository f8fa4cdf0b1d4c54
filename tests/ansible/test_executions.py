"""What a host costs: remote executions, counted by a stand-in for ``ssh`` that notes each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ansible.conftest import Fleet, play
from tests.conftest import Reached

pytestmark = pytest.mark.hosts


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], int]:
    """A function that returns how many calls of ``ssh`` there were since it was last asked."""
    log = tmp_path / "calls"
    script = tmp_path / "ssh"
    script.write_text(f'#!/bin/sh\necho call >> "{log}"\nexec /usr/bin/ssh "$@"\n')
    script.chmod(0o755)

    def count() -> int:
        number = len(log.read_text().splitlines()) if log.exists() else 0
        log.unlink(missing_ok=True)
        return number

    return count


def test_one_execution_a_host(
    pair: list[Reached], fleet_of: Callable[[list[Reached]], Fleet], calls: Callable[[], int], tmp_path: Path
) -> None:
    inventory = fleet_of(pair).write(ansible_ssh_executable=str(tmp_path / "ssh"))
    assert play("preflight.yml", inventory).code == 0
    assert calls() == len(pair)
    assert play("deploy.yml", inventory).code == 0
    assert calls() == 2 * len(pair)  # preflight; backup, patch and static gates
    assert play("deploy.yml", inventory).changed == 0
    assert calls() == 2 * len(pair)
    assert play("verify.yml", inventory).code == 0
    assert calls() == len(pair)
    assert play("rollback.yml", inventory).code == 0
    assert calls() == len(pair)
