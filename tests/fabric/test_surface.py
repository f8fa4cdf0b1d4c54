"""What ``fab`` offers, and what it refuses before it touches a host."""

import subprocess
from pathlib import Path

import pytest

from tests.fabric.conftest import FAB, fab

TASKS = ["preflight", "backup", "bundle", "patch", "verify", "deploy"]
TASKS += ["health", "status", "logs", "rollback", "history", "matrix"]
NOWHERE = "gpu:\n  hosts:\n    gpu1: {ansible_host: 198.51.100.1, ansible_port: 1}\n"


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    """An inventory of a host that nobody can reach: what gets so far ends with exit code 1, not 2."""
    file = tmp_path / "hosts.yml"
    file.write_text(NOWHERE)
    return str(file)


def test_list_shows_exactly_the_tasks_in_one_line_each() -> None:
    lines = fab("--list").out.splitlines()
    listed = [line for line in lines if line.startswith("  ")]
    assert sorted(line.split()[0] for line in listed) == sorted(TASKS)
    assert all(len(line.split()) > 3 and len(line) <= 80 for line in listed)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_and_option_has_help(task: str) -> None:
    said = fab("--help", task).out
    options = [line for line in said.splitlines() if line.strip().startswith("--")]
    assert all(len(line.split()) >= 2 for line in options), said
    if task not in ("bundle", "matrix"):
        assert {"--hosts=STRING", "--limit=STRING", "--inventory=STRING"} <= {
            line.split()[0] for line in options
        }
    assert ("--dry-run" in said) == (task in ("backup", "patch", "deploy", "rollback"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "--hosts", "gpu9"], "'gpu9'"),
        (["verify", "--hosts", "gpu1; touch /tmp/injected"], "touch"),
        (["verify", "--limit", "gpu1:gpu9"], "gpu9"),
        (["history", "--last", "-1"], "--last"),
        (["logs", "--lines", "many"], "--lines"),
        (["health", "--gates", "luck"], "--gates"),
        (["health"], "sglang_server_instances"),
        (["patch", "--patch", "nothing"], "nothing"),
        (["patch", "--patch", "/nowhere/b.json"], "/nowhere/b.json"),
        (["-H", "gpu1", "verify"], "after the task's name"),
        (["--dry", "rollback"], "after the task's name"),
    ],
)
def test_a_wrong_request_touches_no_host(nowhere: str, words: list[str], said: str) -> None:
    ran = fab(*words, "--inventory", nowhere)
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.strip().splitlines()) == 1, ran.err
    assert not ran.out


def test_a_right_request_is_sent(nowhere: str) -> None:
    """The proof that the test above can tell."""
    ran = fab("verify", "--inventory", nowhere)
    assert ran.code == 1
    assert "cannot connect to 198.51.100.1 port 1" in ran.out


def test_bundle_is_the_same_each_time(tmp_path: Path) -> None:
    assert fab("bundle", "--out", f"{tmp_path}/a").code == 0
    assert fab("bundle", "--out", f"{tmp_path}/b").code == 0
    subprocess.run(["cmp", f"{tmp_path}/a", f"{tmp_path}/b"], check=True)
    refused = fab("bundle", "--out", f"{tmp_path}/no/where")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)


def test_fab_is_found_from_a_folder_below() -> None:
    done = subprocess.run([FAB, "--list"], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert "verify" in done.stdout
