"""Patched modules import with the server's own interpreter and the real package, and the flag parses there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.hosts import sglang_env
from tests.patch.conftest import ENGINE

pytestmark = pytest.mark.live


@pytest.mark.parametrize("version", sglang_env.versions())
def test_imports(version, bundle_file, proves):
    proves("imports", version)
    source = sglang_env.build(version).resolve()
    with tempfile.TemporaryDirectory(dir=source.parent) as name:
        copy = Path(name) / "env"
        subprocess.run(["cp", "-al", source, copy], check=True)
        where = ["--python", str(copy / "bin/python"), "--store", f"{name}/store", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "specgate", "apply", *where, "--bundle", str(bundle_file)],
            env={**os.environ, "PYTHONPATH": str(ENGINE)},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    gates = {gate["gate"]: gate for gate in document["gates"]}
    assert done.returncode == 0, (document["summary"], gates)
    assert {"server_args OK", "eagle_worker_v2 OK", "batch_threshold OK"} <= set(gates["import"]["evidence"])
    assert gates["flag"]["outcome"] == "passed"
    assert "--speculative-disable-batch-threshold 16 gives" in " ".join(gates["flag"]["evidence"])
    assert document["warnings"] == []
