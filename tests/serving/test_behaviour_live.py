"""EAGLE-3 on SGLang 0.5.23, as the gates on the running server see it. Bad builds: tests/ansible/test_rollout_live.py.

The tests tell one story, in this order, on one host.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import HostMaker
from tests.serving.conftest import EAGLE3, UNIT, Served

pytestmark = [pytest.mark.hosts, pytest.mark.live]
KEY = "k3y-that-nobody-may-see"
WITH_KEY = "--api-key-file /etc/sglang/main.key --threshold 2"


@pytest.fixture(scope="module")
def served(make_hosts: HostMaker, serve: Callable[..., Served]) -> Served:
    host = make_hosts("spec1", sglang="0.5.23")[0]
    served = serve(host, 2, EAGLE3)
    served.variables["sglang_server_api_keys"] = {"main": KEY}
    assert served.play("sglang_patch", "sglang_server").code == 0
    return served


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
