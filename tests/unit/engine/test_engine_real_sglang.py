"""The engine on real SGLang environments: real imports, real parser, real RECORD, hard-linked files."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from controller import render
from tests.hosts import sglang_env
from tests.unit.engine import mini
from tests.unit.engine.conftest import Host


@pytest.mark.live
def test_real_sglang_is_patched_and_restored():
    """A copy by hard links: the environment it comes from, as uv's cache would, must not see the patch."""
    source = sglang_env.build("0.5.9").resolve()
    with tempfile.TemporaryDirectory(dir=source.parent) as name:
        subprocess.run(["cp", "-al", source, f"{name}/env"], check=True)
        host = Host(Path(name) / "env", Path(name) / "store")
        package = host.root / "sglang" / "srt"
        original = mini.digest_of(mini.site(source) / "sglang" / "srt")
        document = host.apply(render.render())
        assert document["outcome"] == "passed", document
        gates = {gate["gate"]: gate for gate in document["gates"]}
        assert {"server_args OK", "eagle_worker_v2 OK"} <= set(gates["import"]["evidence"])
        assert gates["flag"]["outcome"] == "passed" and "(int)" in gates["flag"]["evidence"][0]
        assert gates["source"]["evidence"][:3] == [
            "476:    speculative_disable_batch_threshold: int = 0  # 0 = always speculate",
            '3985:            "--speculative-disable-batch-threshold",',
            "3987:            default=ServerArgs.speculative_disable_batch_threshold,",
        ]
        changed = {path for path, digest in mini.digest_of(package).items() if original.get(path) != digest}
        assert changed == {"./" + one["path"].removeprefix("sglang/srt/") for one in document["files"]}
        again = host.apply(render.render())
        assert again["outcome"] == "passed" and not again["changed"]
        assert host.rollback()["outcome"] == "passed"
        assert mini.digest_of(package) == original
        assert mini.digest_of(mini.site(source) / "sglang" / "srt") == original
        for one in document["files"]:
            live = host.path(one["path"])
            assert mini.record_sha256(host.root, one["path"]) == (
                mini.sha256sum(live) if live.exists() else None
            )
