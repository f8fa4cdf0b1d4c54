"""Hosts that go wrong where a test wants it: a server with faults, and steps of a deploy that wait to be interrupted.

A step waits while ``/run/step`` names it, and says so in a file ``held`` on the disk. What is in ``/run`` goes with
the power.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.ansible.conftest import INSTANCE, SERVER, UNIT, install
from tests.conftest import SITE, HostMaker, Reached
from tests.unit.engine import mini

# Ansible's interpreter on the host: it runs the module that it is sent. The answer waits while the step is that
# module: what is lost then has been done, and nobody has heard of it.
INTERPRETER = r"""#!/bin/sh
module=$(mktemp /run/module.XXXXXX)
cat > "$module"
/usr/bin/python3 "$@" < "$module" > "$module.out"
code=$?
while step=$(cat /run/step 2>/dev/null) && grep -q "[.']$step'" "$module"; do touch /var/cache/held; sleep 0.05; done
cat "$module.out"
rm "$module" "$module.out"
exit $code
"""
# In a module that the patch adds: the import gate takes its time, before or after the files are in place.
IMPORT = """\
import glob
import os
import time


def _step():
    if not os.path.exists("/run/step"):
        return ""
    with open("/run/step") as stream:
        return stream.read().strip()


_journal = glob.glob("/var/lib/specgate/installations/*/journal.json")
while _step() == ("live import" if _journal else "staged import"):
    open("/var/cache/held", "w").close()
    time.sleep(0.05)


"""
# Before the small server: what it reads, it does.
FAULTS = """\
import http.server, os, pathlib, time, traceback

def text(path):
    return pathlib.Path(path).read_text().strip() if os.path.exists(path) else ""

def hold(step):
    while text("/run/step") == step:
        pathlib.Path(os.environ["HOME"], "held").touch()
        time.sleep(0.05)

def die(message):
    try:
        raise RuntimeError(message)
    except RuntimeError:
        traceback.print_exc()
        os._exit(1)

fault = text("/opt/fault")
hold("start")
if fault == "never ready":
    print("Loading weights: 1 of 4", flush=True)
    time.sleep(1000)
if fault == "dies at once":
    die("no device")
if fault == "eats memory":
    hoard = [b"x" * (1 << 20) for _ in range(4096)]

class Handler(http.server.BaseHTTPRequestHandler):
    generations = 0

    def send_response(self, *status):
        if self.path == "/server_info":
            hold("gates")
            if fault == "dies when ready":
                die("an illegal memory access was encountered")
        if self.command == "POST":
            Handler.generations += 1
            while fault in ("hangs", "busy") and Handler.generations > 1:
                if fault == "busy":
                    print("Decode batch, #running-req: 7", flush=True)
                time.sleep(0.5)
        super().send_response(*status)

http.server.BaseHTTPRequestHandler = Handler
"""
# What no operation may leave behind, whatever happened to it.
LEFTOVERS = f"""
find {SITE} -name '.*specgate*'
find /var/lib/specgate -name '*.new' -o -name journal.json -o -name transaction -o -name lock -size +0
find /etc/systemd /etc/sglang /usr/local/lib/specgate -name '*.new' -o -name '.ansible*' -o -name '.*specgate*'
find /tmp /var/tmp -name '*specgate*' -not -path '*systemd-private*'
ps -eo args | grep -E '[s]pecgate.pyz|[A]nsiballZ|/opt/[s]tep'
pgrep -u sglang -l | grep -v "^$(systemctl show -P MainPID {UNIT}) "
"""


# The gate before each start takes time, and is not what goes wrong here.
COMMON = {
    "sglang_server_instances": [INSTANCE],
    "sglang_server_start_seconds": 60,
    "sglang_server_stop_seconds": 5,
    "sglang_server_import_gate": False,
}


def wheel(folder: Path, version: str = "0.5.9") -> bytes:
    """Build a small SGLang whose server has faults."""
    return mini.wheel(folder, version, {"sglang/launch_server.py": FAULTS + SERVER}).read_bytes()


def bring_up(make_hosts: HostMaker, folder: Path, *names: str, memory: str = "") -> dict[str, Reached]:
    """Bring up hosts with the small SGLang, and return them by name; ``folder`` is for its wheel."""
    small = wheel(folder)
    hosts = make_hosts(*names, sglang="none", memory=memory)

    def prepare(host: Reached) -> None:
        install(host, small)
        host.put("/opt/step", INTERPRETER.encode(), "755")

    with ThreadPoolExecutor() as pool:
        list(pool.map(prepare, hosts))
    return {host.name: host for host in hosts}


def bundle(field: str = "") -> dict[str, Any]:
    """Return a bundle whose import gate can be held; another ``field`` comment makes another bundle."""

    def change(variant: dict[str, Any]) -> None:
        args, created = variant["files"][:2]
        args["edits"][0]["text"] += field
        created["create"] = IMPORT + mini.CREATE_TEXT

    return mini.altered(change)


def hold(host: Reached, step: str) -> None:
    """Make a step wait when it comes."""
    host.sudo(f"rm -f /var/cache/held /var/cache/sglang/held; echo {shlex.quote(step)} > /run/step")


def held(host: Reached) -> bool:
    """Say whether the step waits, as the host's disk shows from outside."""
    return any((host.host.dir / "up/var/cache").glob("**/held"))


def release(host: Reached) -> None:
    """Let the step go on, and wait until the host has nothing more to do for anybody."""
    host.sudo(
        "rm -f /run/step; for i in $(seq 200); do pgrep -f '/opt/[s]tep' || exit 0; sleep 0.05; done; exit 1"
    )


def leftovers(host: Reached) -> list[str]:
    """Return what an operation has left behind: files of a transaction, locks, processes outside the unit."""
    return host.sudo(LEFTOVERS, check=False).stdout.splitlines()


def story(host: Reached) -> list[str]:
    """Return what the host's audit log tells: operation and outcome of each line."""
    log = host.sudo("cat /var/lib/specgate/audit.jsonl", check=False).stdout
    lines = [json.loads(line) for line in log.splitlines()]
    assert all(line["actor"] and line["run_id"] and line["started"] for line in lines)
    return [f"{line['operation']} {line['outcome']}" for line in lines]


def deployed(host: Reached) -> bool:
    """Say whether the host serves the patch: the running server says so itself."""
    look = f"systemctl is-active -q {UNIT} && curl -s -m 5 http://127.0.0.1:30000/server_info"
    return mini.FIELD in host.run(look, check=False).stdout


def told(out: str, host: str, hosts: Iterable[str]) -> str:
    """Return what the result at the end of a run says of one of its hosts, without line breaks."""
    result = out[out.rindex("RESULT") :]
    others = "|".join(map(re.escape, hosts))
    found = re.search(
        rf"^{re.escape(host)}: .*?(?=^(?:{others}): |^host +sglang|\Z)", result, re.DOTALL | re.MULTILINE
    )
    return " ".join(found.group().split()) if found else ""
