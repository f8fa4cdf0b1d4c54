"""Measures what a fleet costs: seconds and remote executions a host, beside other ways to make the same change.

    .venv/bin/python -m benchmarks.fleet.bench --sizes 1 4 16 32 --out benchmarks/results/fleet.json

Needs root on Linux (test hosts). The contenders, and what each step does there, are in contenders.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.fleet.contenders import PATHS, STEPS, TREE, Contender, Fixture, contenders
from controller.render import dump, render
from tests import wheels
from tests.hosts import cli
from tests.hosts.machine import ROOT, Fleet, Host

VERSION = "0.5.9"
ENGINE = ROOT / "plugins" / "module_utils"


def main() -> int:
    """Bring hosts up, measure, write the raw results and the table beside them; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 32], metavar="HOSTS")
    parser.add_argument(
        "--latency", type=float, default=50, metavar="MS", help="round trip of the last series"
    )
    parser.add_argument("--latency-size", type=int, default=4, metavar="HOSTS", help="0: no such series")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="rounds of each size")
    parser.add_argument("--repeat-large", type=int, default=1, metavar="N", help="rounds from 16 hosts on")
    parser.add_argument("--pyinfra", type=Path, help="the pyinfra command, from an environment of its own")
    parser.add_argument("--only", nargs="+", help="these contenders only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "fleet.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="specgate-fleet-") as scratch:
        plan = [(size, 0.0) for size in sorted(options.sizes)]
        plan += [(options.latency_size, options.latency)] if options.latency_size else []
        for size, latency in plan:
            series(size, latency, options, Path(scratch), result)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(result))
    print(table(result))
    return 0


def series(
    size: int, latency: float, options: argparse.Namespace, scratch: Path, result: dict[str, Any]
) -> None:
    """Measure every contender on ``size`` fresh hosts, in turn, ``repeat`` times."""
    fleet = Fleet.here()
    try:
        hosts = cli.bring_up(fleet, [f"node{number:02}" for number in range(1, size + 1)], sglang="none")
        fixture = prepare(fleet, hosts, scratch / f"{size}-{latency:g}")
        if latency:
            for host in hosts:
                host.latency(latency)
        runners = [
            one
            for one in contenders(fixture, options.pyinfra)
            if not options.only or one.name in options.only
        ]
        for round_number in range(options.repeat if size < 16 else options.repeat_large):
            for contender in runners:
                for step in STEPS:
                    run = {"hosts": size, "latency_ms": latency, "round": round_number} | measure(
                        contender, step, hosts
                    )
                    result["runs"].append(run)
                    print(f"{size:>3} hosts {latency:>3g} ms  {contender.name:<18} {step:<9}"
                          f"{run['seconds']:>7.2f} s {run['executions']:>6.1f} executions", flush=True)  # fmt: skip
                check_and_reset(contender, hosts)
    finally:
        cli.take_down(fleet, [], everything=True)


def prepare(fleet: Fleet, hosts: list[Host], scratch: Path) -> Fixture:
    """Put SGLang's files on each host, make sshd tell of each execution, and write what the contenders need."""
    package, patched = scratch / "pristine", scratch / "patched"
    bundle = scratch / "bundle.json"
    scratch.mkdir(parents=True)
    wheels.unpack(VERSION, package, PATHS)
    subprocess.run(["cp", "-a", package, patched], check=True)
    bundle.write_text(dump(render()))
    command = [sys.executable, "-m", "specgate", "apply", "--no-import", "--bundle", bundle]
    command += ["--root", patched, "--store", scratch / "store"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ENGINE)}, capture_output=True)
    packed = subprocess.run(["tar", "-C", package, "-c", "."], check=True, capture_output=True).stdout
    setup = (
        f"mkdir -p {TREE} /srv/pristine && tar -C {TREE} -x && cp -a {TREE}/. /srv/pristine && "
        "chown -R root: /srv && echo LogLevel VERBOSE >> /etc/ssh/sshd_config && systemctl restart ssh"
    )
    everywhere(hosts, setup, packed)
    return Fixture(fleet, hosts, scratch, patched, bundle)


def everywhere(hosts: list[Host], command: str, data: bytes = b"") -> list[str]:
    """Run a shell command as root on every host; return what each printed."""

    def one(host: Host) -> str:
        done = subprocess.run(
            host.ssh(f"sudo -n sh -c '{command}'"), input=data, capture_output=True, timeout=120
        )
        if done.returncode:
            raise RuntimeError(f"{host.name}: {done.stderr.decode()}")
        return done.stdout.decode()

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, hosts))


def executions(hosts: list[Host]) -> list[tuple[int, int]]:
    """Return for each host how many commands and logins its sshd has seen; to ask adds one of each."""
    asked = everywhere(
        hosts,
        'journalctl -t sshd -o cat | grep -cE "^Starting session"; journalctl -t sshd -o cat | grep -c "^Accepted"',
    )
    return [(int(lines.split()[0]), int(lines.split()[1])) for lines in asked]


def measure(contender: Contender, step: str, hosts: list[Host]) -> dict[str, Any]:
    """Run one step once, with cold connections; return seconds, CPU seconds here, and executions a host."""
    before = executions(hosts)
    load = os.getloadavg()[0]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    done = contender.run(step)
    seconds = time.monotonic() - began
    after_used = resource.getrusage(resource.RUSAGE_CHILDREN)
    contender.close()
    if done.returncode != 0:
        raise RuntimeError(
            f"{contender.name} {step}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    after = executions(hosts)
    return {
        "contender": contender.name,
        "step": step,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(after_used.ru_utime + after_used.ru_stime - used.ru_utime - used.ru_stime, 3),
        "executions": statistics.median(
            late[0] - early[0] - 1 for early, late in zip(before, after, strict=True)
        ),
        "logins": statistics.median(
            late[1] - early[1] - 1 for early, late in zip(before, after, strict=True)
        ),
        "load_before": round(load, 1),
    }


def check_and_reset(contender: Contender, hosts: list[Host]) -> None:
    """See that the rollback gave the pristine bytes back, then take away what the contender left on the hosts."""
    everywhere(hosts, " && ".join(f"cmp {TREE}/{path} /srv/pristine/{path}" for path in PATHS))
    everywhere(hosts, f"rm -rf {TREE} /var/lib/specgate /srv/backup && cp -a /srv/pristine {TREE}")


def table(result: dict[str, Any]) -> str:
    """Return the results as Markdown: medians over the rounds, and the slope over hosts."""
    runs = result["runs"]
    lines = [
        f"Medians on {result['machine']['cores']} cores, {result['date'][:10]}; "
        "written by benchmarks/fleet/bench.py.",
    ]
    for hosts, latency in sorted(
        {(run["hosts"], run["latency_ms"]) for run in runs}, key=lambda one: one[::-1]
    ):
        here = [run for run in runs if (run["hosts"], run["latency_ms"]) == (hosts, latency)]
        rounds = max(run["round"] for run in here) + 1
        what = f"{hosts} host{'s' if hosts > 1 else ''}" + (f", {latency:g} ms round trip" if latency else "")
        what += f" ({rounds} round{'s' if rounds > 1 else ''})"
        lines += ["", f"### {what}", ""]
        lines += [
            "| | " + " | ".join(f"{step} (s)" for step in STEPS) + " | executions a host | CPU here (s) |"
        ]
        lines += ["|---|" + "---:|" * len(STEPS) + "---|---|"]
        for name in dict.fromkeys(run["contender"] for run in here):
            cells = [
                [run for run in here if (run["contender"], run["step"]) == (name, step)] for step in STEPS
            ]
            seconds = [f"{statistics.median(run['seconds'] for run in cell):.1f}" for cell in cells]
            counts = [f"{statistics.median(run['executions'] for run in cell):g}" for cell in cells]
            used = [f"{statistics.median(run['cpu_seconds'] for run in cell):.1f}" for cell in cells]
            lines.append(f"| {name} | {' | '.join(seconds)} | {' / '.join(counts)} | {' / '.join(used)} |")
    slopes = growth(runs)
    if slopes:
        lines += ["", "### Growth: seconds for one more host (least squares)", ""]
        lines += ["| | " + " | ".join(STEPS) + " |", "|---|" + "---:|" * len(STEPS)]
        lines += [
            f"| {name} | {' | '.join(f'{slope:.2f}' for slope in row)} |" for name, row in slopes.items()
        ]
    return "\n".join(lines) + "\n"


def growth(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return by contender the slope of seconds over hosts, a number a step; nothing for a single size."""
    plain = [run for run in runs if run["latency_ms"] == 0]
    if len({run["hosts"] for run in plain}) < 2:
        return {}
    found = {}
    for name in dict.fromkeys(run["contender"] for run in plain):
        row = []
        for step in STEPS:
            points = [
                (run["hosts"], run["seconds"])
                for run in plain
                if (run["contender"], run["step"]) == (name, step)
            ]
            row.append(statistics.linear_regression(*zip(*points, strict=True)).slope)
        found[name] = row
    return found


if __name__ == "__main__":
    sys.exit(main())
