"""What the threshold costs and what it saves, on one GPU.

Starts up to four SGLang servers side by side, then loads them one at a time, in turn, so that all see the same GPU in
the same minutes: no speculation, static EAGLE3, EAGLE3 with the batch threshold, and SGLang's own zero-step off-switch
where it exists. Writes one JSON document with every single measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from shutil import which
from typing import Any

from benchmarks.threshold import models
from benchmarks.threshold.load import generate, measure, prompts
from benchmarks.threshold.servers import Server, request, start_all

NAMES = ("none", "eagle3", "threshold", "zero-step")
SPECULATION = [
    "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "4",
]  # fmt: skip
DECODE_LINE = re.compile(r"#running-req: (\d+).*gen throughput \(token/s\): ([\d.]+)")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter that has SGLang")
    parser.add_argument(
        "--pythonpath", default="", help="PYTHONPATH of the patched SGLang, if it is not installed"
    )
    parser.add_argument(
        "--pristine-pythonpath", default="", help="PYTHONPATH of an unpatched one for the other servers"
    )
    parser.add_argument("--attention-backend", default="triton", help="triton, fa3, flashinfer …")
    parser.add_argument(
        "--servers", default="none,eagle3,threshold,zero-step", help=f"out of {', '.join(NAMES)}"
    )
    parser.add_argument("--concurrency", default="1,8,32,64,128")
    parser.add_argument("--threshold", type=int, default=16, help="N")
    parser.add_argument(
        "--accept-length", type=float, default=2.5, help="simulated; 0 leaves acceptance to the draft"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--requests",
        type=int,
        default=1,
        help="in a burst at least, one after the other where the concurrency is lower: steadier figures there",
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--draft-vocab", type=int, default=models.DRAFT_VOCAB)
    parser.add_argument(
        "--model", help="a real target instead of the 8B shape with dummy weights (needs --draft)"
    )
    parser.add_argument("--draft", help="its EAGLE3 draft")
    parser.add_argument(
        "--environment", action="append", default=[], metavar="NAME=VALUE", help="for every server"
    )
    parser.add_argument("--extra", default="", help="more arguments for every server, as one string")
    parser.add_argument("--port", type=int, default=31000, help="the first of as many ports as servers")
    parser.add_argument("--start-timeout", type=float, default=400, help="seconds")
    parser.add_argument(
        "--budget", type=float, default=0, help="seconds after which no new round starts; 0: no limit"
    )
    parser.add_argument(
        "--profile", type=int, default=0, metavar="CONCURRENCY", help="profile some steps at it, at the end"
    )
    parser.add_argument("--logs", type=Path, default=Path("threshold-logs"))
    parser.add_argument("--out", type=Path, default=Path("threshold.json"))
    parser.add_argument(
        "--pairs-after",
        type=int,
        default=10**6,
        metavar="REPEATS",
        help="from then on only what is compared: static EAGLE3 up to N, no speculation above, and the threshold",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="measure the others when a server did not start"
    )
    parser.add_argument(
        "--cross",
        type=float,
        default=0,
        metavar="SECONDS",
        help="first keep crossing the threshold both ways for so long, under load; a hang fails",
    )
    parser.add_argument("--confirm", action="store_true", help="measure only after a line on standard input")
    return parser.parse_args()


def arguments(name: str, chosen: argparse.Namespace, version: str, target: Path, draft: Path) -> list[str]:
    """The arguments of the server `name` for this SGLang `version`."""
    largest = max(concurrencies(chosen))
    common = [
        "--model-path",
        str(target),
        "--attention-backend",
        chosen.attention_backend,
        "--random-seed",
        "1",
    ]
    if not chosen.model:
        common += ["--load-format", "dummy", "--skip-tokenizer-init"]
    common += [
        "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-radix-cache",
        "--max-running-requests", str(largest), "--cuda-graph-max-bs", str(largest),
        "--context-length", "4096", "--decode-log-interval", "20",
        # The KV pool is fixed, so that servers which start side by side do not share out the memory by chance.
        "--mem-fraction-static", "0.9",
        "--max-total-tokens", str(largest * (chosen.prompt_tokens + chosen.new_tokens + 16) + 1024),
        *chosen.extra.split(),
    ]  # fmt: skip
    if tuple(int(part) for part in version.split(".")[:3]) >= (0, 5, 10):  # there it is on by default
        common += ["--disable-piecewise-cuda-graph"]
    if chosen.tensor_parallel > 1:
        common += ["--tp-size", str(chosen.tensor_parallel)]
    if name == "none":
        return common
    common += [*SPECULATION, "--speculative-draft-model-path", str(draft)]
    if name == "threshold":
        common += ["--speculative-disable-batch-threshold", str(chosen.threshold)]
    if name == "zero-step":
        slots = {"1": {"candidate_steps": [3]}, str(chosen.threshold + 1): {"candidate_steps": [0]}}
        path = target.parent / "zero-step.json"
        path.write_text(json.dumps(slots))
        common += ["--speculative-adaptive", "--speculative-adaptive-config", str(path)]
    return common


def concurrencies(chosen: argparse.Namespace) -> list[int]:
    """The concurrencies, smallest first."""
    return sorted(int(part) for part in chosen.concurrency.split(","))


def build(chosen: argparse.Namespace, version: str, target: Path, draft: Path) -> list[Server]:
    """The servers that were asked for, not started."""
    shared = dict(entry.split("=", 1) for entry in chosen.environment)
    servers = []
    for offset, name in enumerate(chosen.servers.split(",")):
        if name not in NAMES:
            raise SystemExit(f"--servers: {name!r} is none of {', '.join(NAMES)}")
        environment = dict(shared)
        if name != "none" and chosen.accept_length:
            environment["SGLANG_SIMULATE_ACC_LEN"] = str(chosen.accept_length)
        path = chosen.pythonpath if name == "threshold" else chosen.pristine_pythonpath or chosen.pythonpath
        servers.append(
            Server(
                name=name,
                port=chosen.port + 10 * offset,
                arguments=arguments(name, chosen, version, target, draft),
                logs=chosen.logs,
                python=chosen.python,
                pythonpath=path,
                environment=environment,
            )
        )
    return servers


def steady(log: Path, start: int, concurrency: int) -> float | None:
    """Median of the throughput that the server itself logged, from byte `start` on, with all requests decoding."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    found = [float(rate) for running, rate in DECODE_LINE.findall(text) if int(running) == concurrency]
    # The first line of a burst counts the prefill in.
    return round(statistics.median(found[1:]), 1) if len(found) > 1 else None


def rounds(chosen: argparse.Namespace, servers: list[Server]) -> list[dict[str, Any]]:
    """Measure every server at every concurrency, in turn, `repeats` times."""
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for repeat in range(chosen.repeats):
        if chosen.budget and repeat and (time.monotonic() - began) * (repeat + 1) / repeat > chosen.budget:
            print(f"stopping after {repeat} repeats: the budget of {chosen.budget} s is used up", flush=True)
            break
        for concurrency in concurrencies(chosen):
            turn = repeat % len(servers)
            baseline = "none" if concurrency > chosen.threshold else "eagle3"
            for server in servers[turn:] + servers[:turn]:
                if repeat >= chosen.pairs_after and server.name not in ("threshold", baseline):
                    continue
                before = server.threshold_state() if server.name == "threshold" else None
                position = server.log.stat().st_size
                measurement = measure(
                    server.port,
                    concurrency,
                    max(concurrency, chosen.requests),
                    chosen.prompt_tokens,
                    chosen.new_tokens,
                    seed=1000 * repeat + concurrency,
                )
                row = {"server": server.name, "repeat": repeat, **asdict(measurement)}
                row["steady_throughput"] = steady(server.log, position, concurrency)
                after = server.threshold_state() if before else None
                if before and after:
                    row["steps"] = {
                        k: after[k] - before[k] for k in ("plain_steps", "speculative_steps", "switches")
                    }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def cross(server: Server, chosen: argparse.Namespace) -> dict[str, int]:
    """Load that swells above the threshold and ebbs below it again and again; return how far the counters moved.

    A request that is not answered within two minutes raises: ranks that disagree on a step would hang there.
    """
    before = server.threshold_state() or {}
    deadline = time.monotonic() + chosen.cross
    failures: list[BaseException] = []

    def client(number: int) -> None:
        turn = 0
        while time.monotonic() < deadline and not failures:
            tokens = 40 + 37 * (number + turn) % 160
            try:
                generate(server.port, prompts(1, 64, 30000, number * 1000 + turn)[0], tokens, timeout=120)
            except BaseException as error:
                failures.append(error)
            turn += 1
            # most clients pause together, so that the batch falls below the threshold and rises again
            if number > chosen.threshold // 2:
                time.sleep(1.5)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(3 * chosen.threshold)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    after = server.threshold_state() or {}
    return {
        key: after[key] - before[key]
        for key in ("plain_steps", "speculative_steps", "switches")
        if key in after
    }


def medians(rows: list[dict[str, Any]], key: str = "throughput") -> dict[str, dict[int, float]]:
    """Median of `key` over the repeats, by server and concurrency."""
    groups: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row[key] is not None:
            groups.setdefault(row["server"], {}).setdefault(row["concurrency"], []).append(row[key])
    return {name: {c: statistics.median(v) for c, v in by.items()} for name, by in groups.items()}


def profile(server: Server, chosen: argparse.Namespace) -> None:
    """Record some steps in the middle of a burst with SGLang's own torch profiler; traces go beside the logs."""
    folder = (chosen.logs / f"profile-{server.name}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    load = threading.Thread(
        target=measure,
        args=(server.port, chosen.profile, chosen.profile, chosen.prompt_tokens, chosen.new_tokens, 7),
    )
    load.start()
    time.sleep(1.2)
    wanted = {"output_dir": str(folder), "num_steps": 10, "activities": ["GPU"]}
    request(server.port, "/start_profile", wanted, timeout=120)
    load.join()
    deadline = time.monotonic() + 40
    while not list(folder.glob("*.gz")) and time.monotonic() < deadline:
        time.sleep(0.5)


def machine(chosen: argparse.Namespace) -> dict[str, str]:
    """GPU, driver and package versions, from the interpreter that ran the servers."""
    code = (
        "import json, importlib.metadata as m, torch\n"
        "def v(*names):\n"
        "    for n in names:\n"
        "        try: return m.version(n)\n"
        "        except m.PackageNotFoundError: pass\n"
        "print(json.dumps({'sglang': v('sglang'), 'kernel': v('sglang-kernel', 'sgl-kernel'),"
        " 'torch': torch.__version__,"
        " 'transformers': v('transformers'), 'flashinfer': v('flashinfer-python'), 'triton': v('triton'),"
        " 'gpu': torch.cuda.get_device_name(0)}))"
    )
    environment = os.environ | ({"PYTHONPATH": chosen.pythonpath} if chosen.pythonpath else {})
    answer = subprocess.run(
        [chosen.python, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    found: dict[str, str] = json.loads(answer.stdout.strip().splitlines()[-1])
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False) if which(query[0]) else None
    found["driver"] = driver.stdout.split()[0] if driver and driver.stdout.split() else "unknown"
    return found


def main() -> int:
    """Run the benchmark; exit code 1 when a server did not start."""
    chosen = options()
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = models.write(Path(scratch), chosen.draft_vocab)
        if chosen.model:
            target, draft = Path(chosen.model), Path(chosen.draft)
        found = machine(chosen)
        servers = build(chosen, found["sglang"], target, draft)
        document: dict[str, Any] = {
            "benchmark": "threshold",
            "machine": found,
            "command": shlex.join(["python3", "-m", "benchmarks.threshold.bench", *sys.argv[1:]]),
            "attention_backend": chosen.attention_backend,
            "threshold": chosen.threshold,
            "accept_length": chosen.accept_length,
            "prompt_tokens": chosen.prompt_tokens,
            "new_tokens": chosen.new_tokens,
            "tensor_parallel": chosen.tensor_parallel,
            "draft_vocab": chosen.draft_vocab,
        }
        try:
            failures = start_all(servers, chosen.start_timeout)
            document["failed_to_start"] = failures
            for name, reason in failures.items():
                print(f"{name} did not start: {reason[-1500:]}", flush=True)
            if failures and not chosen.keep_going:
                return 1
            alive = [server for server in servers if server.name not in failures]
            for server in alive:  # compiles what the first requests of each size would compile
                for concurrency in concurrencies(chosen):
                    measure(server.port, concurrency, concurrency, chosen.prompt_tokens, 12, seed=concurrency)
            print("servers are warm:", *(f"{s.name} {s.healthy_after} s" for s in alive), flush=True)
            if chosen.confirm:
                sys.stdin.readline()
            for server in alive:
                if chosen.cross and server.name == "threshold":
                    document["crossed"] = cross(server, chosen)
                    print("crossed:", document["crossed"], flush=True)
            document["measurements"] = rounds(chosen, alive)
            document["servers"] = [server.describe() for server in servers]
            document["medians"] = medians(document["measurements"])
            document["medians_steady"] = medians(document["measurements"], "steady_throughput")
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text(json.dumps(document, indent=1) + "\n")
            if chosen.profile:
                for server in alive:
                    if server.name in ("none", "threshold"):
                        profile(server, chosen)
        finally:
            for server in servers:
                server.stop()
    for name, values in document["medians"].items():
        print(f"{name:10s}", *(f"{c}: {v:.0f}" for c, v in values.items()), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
