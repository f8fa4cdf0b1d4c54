"""The accidents happen on the engine's own test installation, some of them to an engine in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from tests.unit.engine import mini
from tests.unit.engine.conftest import Host, host, installed_once

__all__ = ["host", "installed_once", "start_apply"]

_ENGINE = """\
import os, sys
from specgate import cli
def on_step(name):
    {}
sys.exit(cli.main(None, on_step))
"""


def start_apply(
    host: Host, bundle: dict[str, Any], *words: str, on_step: str = "pass"
) -> subprocess.Popen[str]:
    """Start an ``apply`` as its command line does; ``on_step`` is a statement that it runs at each step."""
    path = host.store.parent / "bundle.json"
    path.write_text(json.dumps(bundle))
    command = [sys.executable, "-c", _ENGINE.format(on_step), "apply", "--json", "--bundle", path]
    return subprocess.Popen(
        [*command, "--python", host.python, "--store", host.store, *words],
        env={**os.environ, "PYTHONPATH": str(mini.ENGINE)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_listen,
    )


def _listen() -> None:
    """Take signals as a terminal's program does: whoever runs the tests in the background has them ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
