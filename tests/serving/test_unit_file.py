"""The unit that the role writes: what systemd says of it, and what it opens."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from specgate import unit_file
from specgate.unit_file import UnitError

from tests.ansible.conftest import PLAYBOOK, ROOT

ROLE = ROOT / "roles" / "sglang_server"
INSTANCES: list[dict[str, Any]] = [
    {
        "name": "threshold",
        "model": "/srv/models/llama",
        "port": 30000,
        "gpus": [0, 1],
        "speculative_disable_batch_threshold": 16,
        "arguments": {
            "speculative-algorithm": "EAGLE3",
            "enable-metrics": True,
            "disable-radix-cache": False,
            "cuda-graph-bs": [1, 2],
            "json-model-override-args": {"a": 'b "c"'},
        },
    },
    {"name": "baseline", "model": "meta-llama/Llama-3.1-8B", "port": 30001},
    {"name": "cpu", "model": '/srv/50% $HOME "x"', "port": 30002, "gpus": [], "host": "::1"},
    {"name": "home", "model": "/home/ann/model", "port": 30003, "gpus": ["GPU-aaa"], "host": "0.0.0.0"},
]


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every unit, as Ansible renders it with the role's defaults."""
    folder = tmp_path_factory.mktemp("units")
    task = {
        "name": "Render",
        "ansible.builtin.copy":
            {"content": f"{{{{ lookup('template', '{ROLE}/templates/sglang.service.j2') }}}}",
             "dest": f"{folder}/{{{{ instance.name }}}}", "mode": "0644"},
        "loop": "{{ sglang_server_instances }}",
        "loop_control": {"loop_var": "instance"},
    }  # fmt: skip
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [task]}
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    variables = {"sglang_server_instances": INSTANCES, "sglang_server_api_keys": {"home": "k"}}
    files = [f"@{ROOT}/roles/{name}/defaults/main.yml" for name in ("specgate", "sglang_server")]
    # an interpreter that exists here: systemd looks
    variables["specgate_python"] = "/usr/bin/python3"
    command = [str(PLAYBOOK), "-i", "localhost,", str(folder / "play.yml")]
    for extra in [*files, json.dumps(variables)]:
        command += ["-e", extra]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return {f"sglang@{one['name']}.service": (folder / one["name"]).read_text() for one in INSTANCES}


def test_systemd_has_nothing_to_say_of_any_unit(units: dict[str, str]) -> None:
    for name, text in units.items():
        assert unit_file.verify(name, text, exposure=100) == []


def test_no_unit_is_more_exposed_than_the_default_allows(units: dict[str, str]) -> None:
    limit = yaml.safe_load((ROLE / "defaults/main.yml").read_text())["sglang_server_exposure"]
    for name, text in units.items():
        unit_file.verify(name, text, limit)
    naive = "[Service]\nType=exec\nExecStart=/usr/bin/python3 -m sglang.launch_server\n"
    with pytest.raises(UnitError, match=r"more exposed than 2\.0"):
        unit_file.verify("sglang@naive.service", naive, limit)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Type=exec", "Type=bogus"),
        ("KillMode=control-group", "KilMode=control-group"),
        ("TimeoutStopSec=60", "TimeoutStopSec=soon"),
        ('ExecStart="/usr/bin/python3"', 'ExecStart="/nonexistent/python3"'),
    ],
)
def test_whatever_systemd_would_ignore_is_refused(units: dict[str, str], before: str, after: str) -> None:
    name = "sglang@threshold.service"
    assert before in units[name]
    with pytest.raises(UnitError, match="systemd would not take"):
        unit_file.verify(name, units[name].replace(before, after), 100)


def test_what_is_relaxed_says_why(units: dict[str, str]) -> None:
    for text in units.values():
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if re.fullmatch(r"\w+=(no|read-only|all)|DeviceAllow=.*", line) and not line.startswith(
                "Timeout"
            ):
                above = next(
                    one
                    for one in reversed(lines[:number])
                    if not re.match(r"Device(Policy|Allow)=|ProtectProc=", one)
                )
                assert above.startswith("#"), line


def test_gpus_are_chosen_by_cuda_and_opened_as_devices(units: dict[str, str]) -> None:
    assert "CUDA_VISIBLE_DEVICES=0,1\n" in units["sglang@threshold.service"]
    assert "--gpus 0,1\n" in units["sglang@threshold.service"]
    assert "CUDA_VISIBLE_DEVICES=" not in units["sglang@baseline.service"]
    for name in ("threshold", "baseline", "home"):
        assert "DeviceAllow=char-nvidia* rw\n" in units[f"sglang@{name}.service"]
    assert "PrivateDevices=yes\n" in units["sglang@cpu.service"]
    assert "nvidia" not in units["sglang@cpu.service"].split("[Service]")[1]


def test_words_reach_the_server_as_they_are(units: dict[str, str]) -> None:
    start = units["sglang@threshold.service"].split("ExecStart=")[1].split("\n# ")[0]
    assert "--enable-metrics" in start and "--disable-radix-cache" not in start
    assert '--cuda-graph-bs "1" "2"' in start
    assert "--speculative-disable-batch-threshold 16" in start
    assert '--model-path "/srv/50%% $$HOME \\"x\\""' in units["sglang@cpu.service"]


def test_a_model_at_home_can_be_read(units: dict[str, str]) -> None:
    assert "ProtectHome=read-only\n" in units["sglang@home.service"]
    assert "ProtectHome=yes\n" in units["sglang@threshold.service"]


def test_the_probe_reaches_a_server_that_listens_everywhere(units: dict[str, str]) -> None:
    assert "--url http://127.0.0.1:30003 " in units["sglang@home.service"]
    assert "--url http://[::1]:30002 " in units["sglang@cpu.service"]


def test_a_name_that_is_no_unit_is_refused() -> None:
    for name in ("../x.service", "x", "a b.service"):
        with pytest.raises(UnitError, match="no name of a service unit"):
            unit_file.remove(name, check=True, timeout=1)


def test_nothing_is_left_of_the_check(
    units: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unit_file.verify("sglang@cpu.service", units["sglang@cpu.service"], 100)
    assert list(tmp_path.iterdir()) == []
