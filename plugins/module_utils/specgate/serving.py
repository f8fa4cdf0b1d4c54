"""The commands ``wait`` and ``probe``: gates on a running server, and what a unit asks before a start."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

from . import behaviour, health, journalctl, operations, serving_ports, text
from .document import Report
from .errors import Refused
from .gates import Gate, gate
from .health import Watched
from .options import DEFAULT_STORE, Options
from .serving_client import Client
from .serving_tokens import NEAR_TIE

URL = "http://127.0.0.1:30000"
GATES = ("health", "configuration", "behaviour", "record")
Say = Callable[[str], None]
_CACHES = (
    "HOME",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "SGLANG_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
)
_REMEDIES = {
    "failed": "fix what the evidence shows, or roll back",
    "inconclusive": "nothing is proven either way: do what the reason says, then probe again",
}


def add_arguments(subparsers: Any) -> None:
    """Add ``wait`` and ``probe`` to the command line."""
    said = "waits until a server serves (or could be started); ends early when it dies"
    parser = subparsers.add_parser("wait", help=said, description=said)
    _shared(parser, deadline=1800)
    parser.add_argument(
        "--until",
        choices=("serving", "free", "importable"),
        default="serving",
        help="serving: it generates; free: port and GPUs are free; importable: the static gates pass",
    )
    parser.add_argument("--pid", type=int, metavar="PID", help="the server's process; its end ends the wait")
    parser.add_argument("--host", default="127.0.0.1", help="free: the address to listen on")
    parser.add_argument("--port", type=int, metavar="P", help="free: the port")
    parser.add_argument(
        "--gpus", default="", metavar="LIST", help="free: GPUs by index or UUID, commas between"
    )
    parser.add_argument("--python", metavar="PY", help="importable: the server's own interpreter")
    parser.add_argument("--root", metavar="DIR", help="importable: the folder that holds sglang/")
    parser.add_argument(
        "--store", metavar="DIR", default=DEFAULT_STORE, help="importable: default %(default)s"
    )
    parser.add_argument(
        "--import-timeout", type=float, default=180, metavar="S", help="importable: seconds an import"
    )

    said = "gates on a running server"
    parser = subparsers.add_parser("probe", help=said, description=said)
    _shared(parser, deadline=300)
    parser.add_argument("gates", nargs="+", choices=GATES, metavar="GATE", help=", ".join(GATES))
    parser.add_argument(
        "--threshold", type=int, metavar="N", help="what the server must report; default what it says"
    )
    parser.add_argument(
        "--near-tie",
        type=float,
        default=NEAR_TIE,
        metavar="NATS",
        help="tokens closer than this may be chosen either way, default %(default)s",
    )
    parser.add_argument("--reference", metavar="FILE", help="behaviour: compare with it; record: write it")


def _shared(parser: argparse.ArgumentParser, deadline: float) -> None:
    parser.add_argument("--url", default=URL, help="default %(default)s")
    parser.add_argument(
        "--unit", metavar="UNIT", help="the server's unit: its journal says what it does and why it died"
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="file that holds the API key")
    parser.add_argument(
        "--deadline", type=float, default=deadline, metavar="S", help="seconds, default %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON document")


def main(args: argparse.Namespace) -> int:
    """Run ``wait`` or ``probe``, print the document, return the exit code."""
    given = vars(args)
    in_unit = "INVOCATION_ID" in os.environ and not sys.stdout.isatty()

    def say(line: str) -> None:
        print(f"{journalctl.PREFIX}{line}", file=sys.stderr, flush=True)

    if args.command == "wait":
        document = wait(**{name: given[name] for name in _WAIT}, say=say)
    else:
        document = probe(**{name: given[name] for name in _PROBE})
    if args.json:
        print(json.dumps(document))
    elif in_unit:
        # the journal has the traceback already, a few lines above
        print(f"{journalctl.PREFIX}{document['summary']}", flush=True)
    else:
        print(text.render(document))
    return int(document["exit_code"])


_WAIT = (
    "until",
    "url",
    "unit",
    "pid",
    "api_key_file",
    "deadline",
    "host",
    "port",
    "gpus",
    "python",
    "root",
    "store",
    "import_timeout",
)
_PROBE = ("gates", "url", "unit", "api_key_file", "deadline", "threshold", "near_tie", "reference")


def wait(
    until: str = "serving",
    url: str = URL,
    unit: str | None = None,
    pid: int | None = None,
    api_key_file: str | None = None,
    deadline: float = 1800,
    host: str = "127.0.0.1",
    port: int | None = None,
    gpus: str = "",
    python: str | None = None,
    root: str | None = None,
    store: str = DEFAULT_STORE,
    import_timeout: float = 180,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Wait until the server serves, or until it could be started, and return the document.

    ``deadline`` and ``import_timeout`` are in seconds; ``say`` gets a line of progress now and then.
    """
    options = Options(root=root, python=python, store=store, import_timeout=import_timeout)
    if until == "importable":
        return _importable(options)

    def run() -> list[Gate]:
        if until == "free":
            if port is None:
                raise Refused("wait --until free needs --port")
            return [_free(host, port, [one for one in gpus.split(",") if one], unit, deadline, say)]
        return [health.wait(Client(url, _key(api_key_file)), Watched(unit, pid), deadline, say)]

    return _document("wait", options, run)


def probe(
    gates: Sequence[str] = ("health", "configuration"),
    url: str = URL,
    unit: str | None = None,
    api_key_file: str | None = None,
    deadline: float = 300,
    threshold: int | None = None,
    near_tie: float = NEAR_TIE,
    reference: str | None = None,
) -> dict[str, Any]:
    """Run gates on a running server, in order, up to the first that does not pass, and return the document.

    ``deadline`` is in seconds, for each gate. ``record`` writes ``reference``, ``behaviour`` reads it.
    """

    def run() -> list[Gate]:
        client, watched = Client(url, _key(api_key_file)), Watched(unit)
        done: list[Gate] = []
        for name in gates:
            if name == "health":
                done.append(health.health(client, watched, deadline))
            elif name == "configuration":
                done.append(health.configuration(client, threshold, min(deadline, 60.0)))
            elif name == "behaviour":
                done.append(behaviour.behaviour(client, watched, threshold, deadline, near_tie, reference))
            elif name == "record":
                if reference is None:
                    raise Refused("record needs --reference FILE")
                done.append(behaviour.record(client, deadline, reference))
            else:
                raise Refused(f"no gate {name!r}", f"choose from {', '.join(GATES)}")
            if done[-1]["outcome"] != "passed":
                break
        return done

    return _document("probe", Options(), run)


def last_failure(unit: str) -> list[str]:
    """Return why a unit's server died: the last traceback of its last start, as the journal has it."""
    return Watched(unit).cause()


def _document(operation: str, options: Options, run: Callable[[], list[Gate]]) -> dict[str, Any]:
    report = Report(operation, options)
    try:
        report.gates = run()
    except Refused as refusal:
        report.end("refused", refusal.summary, refusal.remedy)
        return report.document()
    last = report.gates[-1]
    report.end(
        last["outcome"], f"{last['gate']}: {last['reason'] or last['proved']}", _REMEDIES.get(last["outcome"])
    )
    return report.document()


def _importable(options: Options) -> dict[str, Any]:
    """Run the static gates when a patch is in use; without one there is nothing to prove before a start."""
    document = operations.status(options)
    if document["outcome"] == "passed" and (
        # files that a killed run left half changed are neither the patch nor SGLang: verify refuses them
        document["bundle"] or document["installation"]["state"] == "unfinished"
    ):
        # run by root, it must leave nothing in the caches that the server will want to write
        with tempfile.TemporaryDirectory(prefix="specgate-import-") as scratch:
            document = operations.verify(replace(options, env={name: scratch for name in _CACHES}))
    document["operation"] = "wait"
    return document


def _free(host: str, port: int, gpus: Sequence[str], unit: str | None, deadline: float, say: Say) -> Gate:
    began = time.monotonic()
    told = None
    while True:
        problem = serving_ports.port_problem(host, port) or (
            serving_ports.gpu_problem(gpus, unit) if gpus else None
        )
        seconds = time.monotonic() - began
        if problem is None:
            proved = f"port {port}" + (f" and GPU {', '.join(gpus)}" if gpus else "") + " free"
            return gate("free", "passed", proved, seconds=seconds)
        if seconds >= deadline:
            return gate(
                "free", "failed", "nothing", reason=f"{problem}, for {seconds:.0f} s", seconds=seconds
            )
        if problem != told:
            say(f"waiting: {problem}")
            told = problem
        time.sleep(0.5)


def _key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"the API key cannot be read: {error}", "give --api-key-file a file that holds the key"
        ) from error
