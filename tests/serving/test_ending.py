"""How a server ended, from what systemd says: words for people, with a way to go on."""

from __future__ import annotations

import pytest
from specgate.systemd import Unit


def unit(result: str, code: str, status: str, pid: int = 0) -> Unit:
    return Unit("sglang@main.service", True, "failed", "failed", pid, "", result, code, status)


@pytest.mark.parametrize(
    ("result", "code", "status", "said"),
    [
        ("exit-code", "1", "3", "exit status 3"),
        ("signal", "2", "9", "killed by SIGKILL, as the kernel does for want of memory: see journalctl -k"),
        ("oom-kill", "2", "9", "killed by SIGKILL, for want of memory: see journalctl -k"),
        ("timeout", "2", "9", "killed by SIGKILL (timeout)"),
        ("core-dump", "3", "11", "killed by SIGSEGV (core-dump)"),
    ],
)
def test_how_it_ended(result: str, code: str, status: str, said: str) -> None:
    assert (unit(result, code, status).ending or "").startswith(said)


def test_one_that_runs_has_not_ended() -> None:
    assert unit("success", "0", "0", pid=7).ending is None
