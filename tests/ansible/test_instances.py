"""Plain servers and one with the threshold, side by side on one host, from deploy to absent.

The tests tell one story, in this order, on one host.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ansible.conftest import Fleet, install, main_pid, play
from tests.conftest import SITE, HostMaker, Reached
from tests.fabric.conftest import fab
from tests.unit.engine import mini

pytestmark = pytest.mark.hosts

KEY, TOKEN = "k3y-that-nobody-may-see", "t0ken-that-nobody-may-see"
BASELINE: dict[str, Any] = {"name": "baseline", "model": "/opt/model", "port": 30000, "gpus": []}
THRESHOLD: dict[str, Any] = {
    "name": "threshold",
    "model": "/opt/model",
    "port": 30001,
    "gpus": [],
    "speculative_disable_batch_threshold": 2,
}
OLD = {**BASELINE, "name": "old", "port": 30002}
NEW = {**OLD, "name": "new"}
DROP_IN = "/etc/systemd/system/sglang@baseline.service.d/local.conf"
LEFT = (
    "ls -d /etc/sglang /usr/local/lib/specgate /var/cache/sglang /etc/systemd/system/sglang@*.service "
    "/etc/systemd/system/*.wants/sglang@*; getent passwd sglang; getent group sglang; pgrep -u sglang"
)


@pytest.fixture(scope="module")
def fleet(make_hosts: HostMaker, wheel: bytes, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    hosts = make_hosts("side1", sglang="none")
    install(hosts[0], wheel)
    made = Fleet(tmp_path_factory.mktemp("side") / "hosts.yml", hosts)
    made.bundle(mini.bundle())
    return made


@pytest.fixture(scope="module")
def host(fleet: Fleet) -> Reached:
    return fleet.hosts[0]


def write(fleet: Fleet, *instances: dict[str, Any]) -> None:
    """Write the inventory of these servers; the threshold's has a key and a secret in its environment."""
    fleet.write(
        sglang_server_instances=list(instances),
        sglang_server_api_keys={"threshold": KEY},
        sglang_server_secret_environment={"threshold": {"HF_TOKEN": TOKEN}},
    )


def pids(host: Reached, *names: str) -> list[int]:
    return [main_pid(host, f"sglang@{name}.service") for name in names]


def test_all_serve(fleet: Fleet, host: Reached) -> None:
    """As verbose as can be, since the next test looks for secrets in all that was said."""
    write(fleet, BASELINE, THRESHOLD, OLD)
    ran = play("deploy.yml", fleet.path, "--diff", "-vvv")
    assert ran.code == 0
    fleet.path.with_name("said").write_text(ran.out)
    found = pids(host, "baseline", "threshold", "old")
    assert 0 not in found and len(set(found)) == 3
    plain, threshold, _ = (host.sudo(f"tr '\\0' ' ' < /proc/{pid}/cmdline").stdout for pid in found)
    assert "--port 30000" in plain and "threshold" not in plain
    assert "--port 30001 --speculative-disable-batch-threshold 2" in threshold


def test_nothing_shows_the_secrets(fleet: Fleet, host: Reached) -> None:
    code = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1"
    assert host.run(f"{code}:30000/server_info").stdout == "200"
    assert host.run(f"{code}:30001/server_info").stdout == "401"
    assert host.run(f"{code}:30001/server_info -H 'Authorization: Bearer {KEY}'").stdout == "200"

    shown = fleet.path.with_name("said").read_text()
    shown += host.sudo(
        "journalctl --no-pager; systemctl show 'sglang@*'; cat /proc/*/cmdline", check=False
    ).stdout
    assert "api_key='***'" in shown and "TASK [sglang_server : Write the API keys]" in shown
    assert KEY not in shown and TOKEN not in shown
    # what is looked for goes in on standard input: sudo logs its command line
    folders = (
        "/etc /usr/local/lib/specgate /var/lib/specgate /var/log /var/cache/sglang /opt/sglang /home /tmp"
    )
    wanted = f"{KEY}\n{TOKEN}\n".encode()
    found = host.sudo(f"grep -rlaF -f - {folders} 2>/dev/null", check=False, data=wanted).stdout.split()
    assert sorted(found) == ["/etc/sglang/threshold.env", "/etc/sglang/threshold.key"]
    modes = host.sudo(f"stat -c '%U %a' /etc/sglang {' '.join(found)}").stdout
    assert modes.splitlines() == ["root 700", "root 600", "root 600"]


def test_the_service_user_writes_to_its_cache_only(host: Reached) -> None:
    cache = "/var/cache/sglang/x"
    others = (
        "/var/lib/specgate/x /var/lib/specgate/audit.jsonl /var/lib/specgate/objects/x /usr/local/lib/specgate/x "
        f"{SITE}/sglang/x {SITE}/sglang/srt/server_args.py /usr/local/lib/specgate/specgate.pyz "
        "/etc/sglang/baseline.env /etc/systemd/system/sglang@baseline.service"
    )
    touch = "setpriv --reuid sglang --regid sglang --clear-groups touch"
    tried = host.sudo(f"for path in {cache} {others}; do {touch} $path && echo $path; done", check=False)
    assert tried.stdout.split() == [cache]
    assert tried.stderr.count("Permission denied") == len(others.split())


def test_each_is_gated_and_the_worst_counts(fleet: Fleet, host: Reached) -> None:
    host.sudo("systemctl stop sglang@baseline")
    ran = play("health.yml", fleet.path)
    host.sudo("systemctl start sglang@baseline")
    assert ran.code == 2
    assert "side1: baseline: FAILED" in ran.words and "side1: sglang@baseline.service: health:" in ran.words
    assert (
        "threshold: configuration: the running server" in ran.words and "old: health: 4 tokens" in ran.words
    )
    row = next(line for line in reversed(ran.out.splitlines()) if line.startswith("side1 "))
    assert row.split() == ["side1", "FAIL", "ok", "FAILED"]


def test_one_is_changed_one_goes_one_comes_and_the_fourth_is_left_alone(fleet: Fleet, host: Reached) -> None:
    """The new one takes the port of the old one; a drop-in stays and counts."""
    host.sudo(f"mkdir {DROP_IN.rpartition('/')[0]}")
    host.put(DROP_IN, b"[Service]\nEnvironment=LOCAL=1\n")
    before = pids(host, "baseline", "threshold")
    changed = {**BASELINE, "arguments": {"speculative-token-map": "x"}}
    write(fleet, changed, THRESHOLD, {**OLD, "state": "absent"}, NEW)
    ran = play("deploy.yml", fleet.path)
    assert (ran.code, ran.changed) == (0, 1)
    after = pids(host, "baseline", "threshold", "new", "old")
    assert after[0] not in (0, before[0])
    assert after[1] == before[1]
    assert after[2] != 0 and after[3] == 0
    left = host.sudo("ls /etc/sglang; cd /etc/systemd/system; ls -d sglang@* *.wants/sglang@*").stdout.split()
    assert left == [
        *("baseline.env", "new.env", "threshold.env", "threshold.key"),
        *(f"multi-user.target.wants/sglang@{name}.service" for name in ("baseline", "new", "threshold")),
        *(
            "sglang@baseline.service",
            "sglang@baseline.service.d",
            "sglang@new.service",
            "sglang@threshold.service",
        ),
    ]
    assert host.read(DROP_IN) == "[Service]\nEnvironment=LOCAL=1\n"
    assert "LOCAL=1" in host.sudo(f"tr '\\0' '\\n' < /proc/{after[0]}/environ").stdout.splitlines()


def test_fab_shows_all_and_takes_all_back(fleet: Fleet, host: Reached) -> None:
    there = ("--inventory", str(fleet.path))
    names = ("baseline", "new", "threshold")
    status = fab("status", *there)
    assert status.code == 0
    assert f"active: {', '.join(names)}" in " ".join(status.out.split())
    logs = fab("logs", *there)
    for name in names:
        assert f"sglang-{name}[" in logs.out
    assert KEY not in logs.out and TOKEN not in logs.out
    health = fab("health", *there, "--gates", "health,configuration")
    assert health.code == 0
    assert [line.split()[1] for line in health.out.splitlines() if "ok" in line.split()] == [
        *("baseline", "threshold", "new")
    ]

    before = pids(host, *names)
    back = fab("rollback", *there, "--json")
    assert back.hosts["side1"]["restarted"] == [f"sglang@{name}.service" for name in names]
    host.assert_pristine()
    assert not set(pids(host, *names)) & {0, *before}


def test_only_what_serves_old_code_is_restarted(fleet: Fleet, host: Reached) -> None:
    there, names = ("--inventory", str(fleet.path)), ("baseline", "new", "threshold")
    assert fab("patch", *there).code == 0
    host.sudo("systemctl restart sglang@new")
    before = pids(host, *names)
    assert play("deploy.yml", fleet.path).changed == 1
    after = pids(host, *names)
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, False]
    assert play("deploy.yml", fleet.path).changed == 0
    assert fab("rollback", *there).code == 0


def test_absent_leaves_nothing_but_what_is_not_the_roles(fleet: Fleet, host: Reached) -> None:
    gone = {"sglang_server_state": "absent", "sglang_server_purge_caches": True}
    assert play("deploy.yml", fleet.path, **gone).code == 0
    assert host.sudo(LEFT, check=False).stdout == ""
    assert host.read(DROP_IN)
    assert fab("rollback", "--inventory", str(fleet.path)).code == 0
    host.assert_pristine()
