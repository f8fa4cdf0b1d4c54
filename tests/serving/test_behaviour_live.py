"""EAGLE-3 on SGLang 0.5.23: a good build passes, and two bad ones that every static gate lets through are caught.

The tests tell one story, in this order, on one host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from controller.render import digest, render
from tests.conftest import HostMaker
from tests.serving.conftest import EAGLE3, UNIT, Served

pytestmark = [pytest.mark.hosts, pytest.mark.live]
KEY = "k3y-that-nobody-may-see"
WITH_KEY = "--api-key-file /etc/sglang/main.key --threshold 2"


def mutated(before: str, after: str) -> dict[str, Any]:
    """Return the bundle with its worker changed on purpose: a bad build that says the right things."""
    bundle = render()
    files = [
        file
        for variant in bundle["variants"]
        if "0.5.23" in variant["sglang"]
        for file in variant["files"]
        if before in file.get("create", "")
    ]
    assert len(files) == 1
    files[0]["create"] = files[0]["create"].replace(before, after)
    bundle["version"] += "-mutated"
    bundle["sha256"] = digest(bundle)
    return bundle


@pytest.fixture(scope="module")
def served(make_hosts: HostMaker, serve: Callable[..., Served]) -> Served:
    host = make_hosts("spec1", sglang="0.5.23")[0]
    served = serve(host, 2, EAGLE3)
    served.variables["sglang_server_api_keys"] = {"main": KEY}
    assert served.play("sglang_patch", "sglang_server").code == 0
    return served


def deploy(served: Served, bundle: dict[str, Any]) -> None:
    """Put a build and restart; every static gate and the start must pass."""
    served.bundle(bundle)
    assert served.play("sglang_patch").code == 0
    assert served.play("sglang_server", sglang_server_restart=True).code == 0


def test_a_good_build_passes(served: Served) -> None:
    document = served.probe("health", "configuration", "behaviour", options=WITH_KEY)
    assert document["exit_code"] == 0, document["summary"]
    evidence = "\n".join(document["gates"][-1]["evidence"])
    assert "Batch threshold: speculation off, decode batch 3 exceeds 2" in evidence
    assert "Batch threshold: speculation on" in evidence


def test_the_key_is_asked_for_and_never_shown(served: Served) -> None:
    status = "-o /dev/null -w '%{http_code}'"
    assert served.curl("/server_info", status) == "401"
    assert served.curl("/server_info", f"{status} -H 'Authorization: Bearer {KEY}'") == "200"
    shown = served.host.sudo(
        f"journalctl --no-pager; systemctl show {UNIT}; systemctl cat {UNIT}; cat /proc/*/cmdline; "
        "cat /proc/*/environ; find /var/lib/specgate -type f -exec cat {} +",
        check=False,
    ).stdout
    assert UNIT in shown and KEY not in shown
    modes = served.host.sudo("stat -c '%U %a' /etc/sglang /etc/sglang/main.key /etc/sglang/main.env").stdout
    assert modes.splitlines() == ["root 700", "root 600", "root 600"]


def test_a_record_from_before_is_compared(served: Served) -> None:
    options = f"{WITH_KEY} --reference /tmp/before.json"
    assert served.probe("record", options=options)["exit_code"] == 0
    document = served.probe("behaviour", options=options)
    assert document["exit_code"] == 0
    assert "like the 4 answers from before the patch" in document["gates"][0]["evidence"]


def test_a_server_that_hangs_with_its_port_open_is_not_healthy(served: Served) -> None:
    scheduler = served.host.run("pgrep -u sglang -f 'sglang::scheduler'").stdout.split()
    assert scheduler
    served.host.sudo(f"kill -STOP {' '.join(scheduler)}")
    document = served.probe("health", options=f"{WITH_KEY} --deadline 3")
    served.host.sudo(f"kill -CONT {' '.join(scheduler)}")
    assert document["exit_code"] == 1
    assert "no token within 3 s, though the port is open" in document["summary"]
    assert served.probe("health", options=WITH_KEY)["exit_code"] == 0


def test_a_worker_that_ignores_the_threshold_is_caught(served: Served) -> None:
    deploy(served, mutated("plain = batch_size > bound", "plain = False"))
    assert served.probe("health", "configuration", options=WITH_KEY)["exit_code"] == 0
    document = served.probe("behaviour", options=WITH_KEY)
    assert document["exit_code"] == 1
    assert "ignores the threshold" in document["summary"]


def test_a_worker_that_answers_wrong_tokens_is_caught(served: Served) -> None:
    right = "tokens = self.target.sample(logits, plain)"
    deploy(served, mutated(right, f"{right}\n        tokens = (tokens + 1) % 500"))
    assert served.probe("health", "configuration", options=WITH_KEY)["exit_code"] == 0
    document = served.probe("behaviour", options=WITH_KEY)
    assert document["exit_code"] == 1
    assert "wrong tokens, above" in document["summary"]


def test_the_audit_log_names_both_bad_builds(served: Served) -> None:
    lines = served.host.read("/var/lib/specgate/audit.jsonl").splitlines()
    versions = [(json.loads(line)["bundle"] or {}).get("version", "") for line in lines]
    assert [version.endswith("-mutated") for version in versions] == [False, True, True]
