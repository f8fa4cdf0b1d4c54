"""The fleet lock: a second operator is refused while the first is at work, and never by a dead one."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - specgate_lock:
        {path: "{{ lock }}", owner: "{{ owner }}", run_id: "{{ run_id }}", hours: "{{ hours | default(4) }}"}
    - command: sleep {{ seconds | default(0) }}
"""


@pytest.fixture
def play(tmp_path: Path):
    """Return a function that starts a playbook which takes the lock."""
    (tmp_path / "play.yml").write_text(PLAY, encoding="utf-8")
    started = []

    def start(owner: str, run_id: str, *more: str, **extra: object) -> subprocess.Popen[str]:
        variables = {"lock": str(tmp_path / "lock"), "owner": owner, "run_id": run_id, **extra}
        command = [
            str(ROOT / ".venv/bin/ansible-playbook"),
            "-i",
            "localhost,",
            "-c",
            "local",
            str(tmp_path / "play.yml"),
            "-e",
            json.dumps(variables),
            *more,
        ]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def holder(path: Path, run_id: str) -> None:
    """Wait until the lock names this run."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if path.exists() and f'"{run_id}"' in path.read_text(encoding="utf-8"):
            return
        time.sleep(0.1)
    raise AssertionError(f"run {run_id} never took the lock")


def test_a_second_operator_is_told_who_is_at_work(play, tmp_path: Path) -> None:
    first = play("alice", "run-a", seconds=60)
    holder(tmp_path / "lock", "run-a")
    second = play("bob", "run-b")
    said = " ".join(second.communicate(timeout=60)[0].split())
    assert second.returncode == 2
    assert "alice is changing this fleet since" in said
    assert f"(run run-a, process {first.pid} on" in said


def test_a_killed_rollout_leaves_the_fleet_free(play, tmp_path: Path) -> None:
    first = play("alice", "run-a", seconds=60)
    holder(tmp_path / "lock", "run-a")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = play("bob", "run-b")
    assert second.wait(timeout=60) == 0, second.communicate()[0]
    assert json.loads((tmp_path / "lock").read_text(encoding="utf-8"))["owner"] == "bob"


def test_an_expired_lock_counts_no_more(play, tmp_path: Path) -> None:
    play("alice", "run-a", seconds=60, hours=0)
    holder(tmp_path / "lock", "run-a")
    assert play("bob", "run-b").wait(timeout=60) == 0


def test_a_lock_from_the_future_is_no_obstacle(play, tmp_path: Path) -> None:
    """The clock was put back: what counts is that its holder has ended."""
    first = play("alice", "run-a")
    first.communicate(timeout=60)
    lock = tmp_path / "lock"
    holder = json.loads(lock.read_text(encoding="utf-8"))
    lock.write_text(
        json.dumps({**holder, "since": "2099-01-01 00:00:00 UTC", "expires": 4e9}), encoding="utf-8"
    )
    os.utime(lock, (4e9, 4e9))
    assert play("bob", "run-b").wait(timeout=60) == 0
    assert json.loads(lock.read_text(encoding="utf-8"))["owner"] == "bob"


def test_check_mode_takes_no_lock(play, tmp_path: Path) -> None:
    assert play("alice", "run-a", "--check").wait(timeout=60) == 0
    assert not (tmp_path / "lock").exists()


def test_a_link_is_not_followed(play, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("", encoding="utf-8")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    process = play("alice", "run-a")
    assert "cannot take the fleet lock" in " ".join(process.communicate(timeout=60)[0].split())
    assert process.returncode == 2
    assert (tmp_path / "precious").read_text(encoding="utf-8") == ""
