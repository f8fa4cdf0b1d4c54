"""SGLang 0.5.9 as a unit on a host with a real systemd: starting, failing, restarting, going away.

The tests tell one story, in this order, on one host.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.conftest import SITE, HostMaker
from tests.fabric.conftest import fab, trees
from tests.serving.conftest import UNIT, Served

pytestmark = [pytest.mark.hosts, pytest.mark.live]
DROP_IN = f"/etc/systemd/system/{UNIT}.d/local.conf"
GENERATE = (
    "-X POST -H 'Content-Type: application/json' "
    """-d '{"text": "A canary", "sampling_params": {"max_new_tokens": 3, "ignore_eos": true}}'"""
)


@pytest.fixture(scope="module")
def pristine(make_hosts: HostMaker, serve: Callable[..., Served]) -> Served:
    """The host before anything was done there."""
    host = make_hosts("unit1")[0]
    served = serve(host, 0, {"attention-backend": "torch_native", "disable-overlap-schedule": True})
    served.variables |= {
        "specgate_no_import": True,  # a start imports more than the gate does
        "specgate_lock_path": str(served.folder / "lock"),
        "sglang_health_gates": ["health", "configuration"],
    }
    host.sudo(f"mkdir -p {DROP_IN.rsplit('/', 1)[0]}")
    host.put(DROP_IN, b"[Service]\nEnvironment=LOCAL=1\n")
    return served


@pytest.fixture(scope="module")
def served(pristine: Served) -> Served:
    """The host as ``fab deploy`` left it."""
    fabric(pristine, "deploy")
    return pristine


def fabric(served: Served, task: str, *words: str, code: int = 0) -> str:
    """Run a task of Fabric on the host and return what it printed; AssertionError for another exit code."""
    ran = fab(task, *words, "--inventory", str(served.inventory()), timeout=800)
    print(ran.out, ran.err)
    assert ran.code == code
    return ran.out


def test_a_dry_run_changes_nothing(pristine: Served) -> None:
    before = trees(pristine.host, f"{SITE}/sglang/srt")
    dry = fabric(pristine, "deploy", "--dry-run")
    assert "+    speculative_disable_batch_threshold: int = 0" in dry
    assert trees(pristine.host, f"{SITE}/sglang/srt") == before
    assert "FAILED" in fabric(pristine, "health", code=1)


def test_a_start_is_over_when_it_serves(served: Served) -> None:
    said = json.loads(served.curl("/generate", GENERATE))
    assert said["meta_info"]["completion_tokens"] == 3
    assert served.curl("/health", "-o /dev/null -w '%{http_code}'") == "200"


def test_fab_sees_it_serve(served: Served) -> None:
    row = fabric(served, "health", "--gates", "health,configuration").splitlines()[-1]
    assert row.split()[:4] == ["unit1", "main", "ok", "ok"]
    assert "active: main" in fabric(served, "status")
    assert "fired up and ready to roll" in fabric(served, "logs", "--lines", "500")


def test_the_running_server_reports_the_field(served: Served) -> None:
    assert json.loads(served.curl("/server_info"))["speculative_disable_batch_threshold"] == 0
    command = served.host.run(f"tr '\\0' ' ' < /proc/{served.pid}/cmdline").stdout
    assert "--speculative-disable-batch-threshold 0" in command
    document = served.probe("health", "configuration", "behaviour", options="--threshold 0")
    assert document["exit_code"] == 0


def test_it_runs_as_its_own_user_without_privileges(served: Served) -> None:
    status = served.host.sudo(f"cat /proc/{served.pid}/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split()[1] == served.host.run("id -u sglang").stdout.strip() != "0"
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert (
        served.host.sudo("su -s /bin/sh sglang -c 'touch /var/lib/specgate/x'", check=False).returncode != 0
    )


def test_the_same_again_changes_and_restarts_nothing(served: Served) -> None:
    before = served.pid
    ran = served.play("sglang_patch", "sglang_server")
    assert (ran.code, ran.changed) == (0, 0)
    assert served.pid == before
    assert served.host.read(DROP_IN) == "[Service]\nEnvironment=LOCAL=1\n"


def test_check_mode_shows_the_unit_and_changes_nothing(served: Served) -> None:
    before = served.pid
    served.instance["arguments"]["log-requests"] = True
    ran = served.play("sglang_server", arguments=("--check", "--diff"))
    assert ran.code == 0
    assert "+    --log-requests" in ran.out
    assert "--log-requests" not in served.host.read(f"/etc/systemd/system/{UNIT}")
    assert served.pid == before
    del served.instance["arguments"]["log-requests"]


def test_a_unit_that_systemd_would_ignore_in_part_is_not_installed(served: Served) -> None:
    before = served.host.sha256(f"/etc/systemd/system/{UNIT}")
    ran = served.play("sglang_server", sglang_server_devices=[], sglang_server_stop_seconds="soon")
    assert ran.code != 0
    assert served.host.sha256(f"/etc/systemd/system/{UNIT}") == before
    ran = served.play("sglang_server", sglang_server_exposure=5)
    assert "more exposed than 0.5" in ran.words
    assert served.host.sha256(f"/etc/systemd/system/{UNIT}") == before


def test_after_a_rollback_the_same_unit_serves_the_old_build(served: Served) -> None:
    before = served.pid
    fabric(served, "rollback")
    served.host.assert_pristine()
    assert served.pid not in (0, before)
    fabric(served, "health")
    assert "speculative_disable_batch_threshold" not in json.loads(served.curl("/server_info"))
    assert "starting without it" in served.journal()
    fabric(served, "health", "--gates", "configuration", code=1)


def test_a_server_that_dies_is_started_again_and_told_of(served: Served) -> None:
    before = served.pid
    assert before
    served.host.sudo(f"kill -9 {before}")
    document = served.probe("health", options="--deadline 0.1")
    assert document["exit_code"] == 1
    assert "not running" in document["summary"] or "nothing listens" in document["summary"]
    served.host.run(
        f"for i in $(seq 100); do test $(systemctl show -P NRestarts {UNIT}) = 0 || exit 0; sleep .2; done; exit 1"
    )


def test_a_start_that_fails_shows_the_traceback(served: Served) -> None:
    served.instance["model"] = "/opt/models/none"
    ran = served.play("sglang_patch", "sglang_server")
    served.instance["model"] = "/opt/models/llama"
    assert ran.code != 0
    assert "Traceback (most recent call last):" in ran.out
    assert "/opt/models/none" in ran.out.split("Traceback")[-1]
    assert served.show("ActiveState") in ("inactive", "failed")


def test_the_accident_does_not_get_as_far_as_a_start(served: Served) -> None:
    path = f"{SITE}/sglang/srt/server_args.py"
    good = served.host.read(path)
    broken = good.replace(
        '"--speculative-accept-threshold-acc",', '"--speculative-accept-threshold-acc"\n x', 1
    )
    assert broken != good
    served.host.put(path, broken.encode())
    done = served.host.sudo(
        f"systemctl reset-failed {UNIT}; systemctl start {UNIT}", check=False, timeout=300
    )
    assert done.returncode != 0
    served.host.sudo(f"systemctl stop {UNIT}")
    said = served.host.sudo(f"journalctl -u {UNIT} -o cat --no-pager -n 20").stdout
    assert "specgate: " in said and "server_args.py" in said
    served.host.put(path, good.encode())


def test_a_port_that_is_taken_says_by_whom(served: Served) -> None:
    served.host.sudo("systemd-run -q --unit squatter python3 -m http.server --bind 127.0.0.1 30000")
    ran = served.play("sglang_server")
    served.host.sudo("systemctl stop squatter")
    assert ran.code != 0
    assert "port 30000 is taken by process" in ran.words
    assert "squatter.service" in ran.words


def test_absent_leaves_nothing(served: Served) -> None:
    ran = served.play("sglang_server", sglang_server_state="absent", sglang_server_purge_caches=True)
    assert ran.code == 0
    left = served.host.sudo(
        "ls -d /etc/sglang /usr/local/lib/specgate /var/cache/sglang /etc/systemd/system/sglang@*.service "
        "/etc/systemd/system/*.wants/sglang@*; getent passwd sglang; getent group sglang; pgrep -u sglang",
        check=False,
    )
    assert left.stdout == ""
    assert served.host.read(DROP_IN), "a drop-in is not ours"
    again = served.play("sglang_server", sglang_server_state="absent", sglang_server_purge_caches=True)
    assert "changed=0" in again.out
