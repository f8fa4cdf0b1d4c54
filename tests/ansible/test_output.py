"""What people see of a deploy over eight hosts: 80 columns, a line a host, the evidence, one table."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ansible.conftest import Ran, play
from tests.ansible.test_deploy import breaks_syntax
from tests.unit.engine import mini

NAMES = [f"gpu-a0{number}.example.net" for number in range(1, 9)]


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Eight installations of the small SGLang on this machine, each a host; the second is the canary."""
    (tmp_path / "good.json").write_text(json.dumps(mini.bundle()))
    (tmp_path / "bad.json").write_text(json.dumps(mini.altered(breaks_syntax)))
    package = mini.wheel(tmp_path)
    for name in NAMES:
        zipfile.ZipFile(package).extractall(tmp_path / name)
    variables: dict[str, Any] = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": "/usr/bin/python3",
        "specgate_patch": str(tmp_path / "good.json"),
        "specgate_python": "",
        "specgate_root": f"{tmp_path}/{{{{ inventory_hostname }}}}",
        "specgate_store": f"{tmp_path}/store-{{{{ inventory_hostname }}}}",
        "specgate_lock_path": f"{tmp_path}/lock",
        "specgate_no_import": True,
    }
    inventory = {
        "gpu": {"hosts": {name: None for name in NAMES}, "vars": variables},
        "canary": {"hosts": {NAMES[1]: None}},
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    return tmp_path / "hosts.yml"


def rows(ran: Ran) -> dict[str, list[str]]:
    """Return the last table, by host."""
    table = ran.out[ran.out.rindex("\nhost ") :].splitlines()[2:]
    return {line.split()[0]: line.split()[1:] for line in table if line.startswith("gpu-")}


def test_eight_hosts(fleet: Path) -> None:
    checked = play("deploy.yml", fleet, "--check", "--diff")
    assert checked.code == 0
    assert checked.out.count("+++ b/sglang/srt/server_args.py") == 1  # eight equal diffs are one diff
    assert checked.out.count("the diff is that of gpu-a02") == 7

    ran = play("deploy.yml", fleet)
    assert ran.code == 0
    assert max(len(line) for line in ran.out.splitlines()) <= 80
    for number in range(1, 9):
        lines = [line for line in ran.out.splitlines() if line.startswith(f"gpu-a0{number}")]
        # found, begun, done, and the result
        assert [
            bool(re.search(word, line))
            for word, line in zip(("pristine", "at work", "put", "ok"), lines, strict=True)
        ]
    order = re.findall(r"^(gpu-a0\d): at work", ran.out, re.MULTILINE)
    assert order[0] == "gpu-a02"
    assert rows(ran) == {f"gpu-a0{n}": ["0.5.9", "plain", "ok", "ok", "-", "-", "yes"] for n in range(1, 9)}

    again = play("deploy.yml", fleet)
    assert again.changed == 0
    assert {row[-1] for row in rows(again).values()} == {"no"}


def test_the_failing_gate_comes_first(fleet: Path) -> None:
    variables = yaml.safe_load(fleet.read_text())
    variables["gpu"]["hosts"][NAMES[1]] = {"specgate_patch": str(fleet.with_name("bad.json"))}
    fleet.write_text(yaml.safe_dump(variables))
    ran = play("deploy.yml", fleet)
    assert ran.code == 2
    result = ran.out[ran.out.index("RESULT") :]
    assert result.index("compile failed") < result.index("\nhost ")
    assert re.search(r"server_args.py line \d+: invalid syntax", result)
    assert "nothing was changed here" in " ".join(result.split())
    assert rows(ran)["gpu-a02"][-1] == "FAILED"
    assert "8 hosts: changed=0 failed=1" in result
