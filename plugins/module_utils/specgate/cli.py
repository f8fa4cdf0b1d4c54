"""The command line: ``python3 -m specgate COMMAND …`` (docs/engine.md)."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Callable

from . import __version__, operations, text
from .errors import Interrupted
from .fs import StepHook
from .options import DEFAULT_STORE, Options

COMMANDS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "inspect": operations.inspect,
    "backup": operations.backup,
    "apply": operations.apply,
    "verify": operations.verify,
    "rollback": operations.rollback,
    "status": operations.status,
    "history": operations.history,
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SERVING = ("wait", "probe")


def main(argv: Sequence[str] | None = None, on_step: StepHook | None = None) -> int:
    """Run one command, print its document, and return its exit code; ``on_step``: see Options."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed = _parser(arguments).parse_args(arguments)
    if parsed.command in SERVING:
        from . import serving

        return serving.main(parsed)
    for number in SIGNALS:
        # nohup and its like mean what they say
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    options = _options(parsed)
    options.on_step = on_step or options.on_step
    document = COMMANDS[parsed.command](options)
    print(json.dumps(document, ensure_ascii=True) if parsed.json else text.render(document))
    return int(document["exit_code"])


def _interrupt(number: int, frame: FrameType | None) -> None:
    # a second one must not cut short the undoing
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)


def _options(parsed: argparse.Namespace) -> Options:
    chosen = {
        name: getattr(parsed, name)
        for name in Options.__dataclass_fields__
        if getattr(parsed, name, None) is not None
    }
    for name in ("env", "pristine"):
        chosen[name] = dict(chosen.get(name) or [])
    return Options(**chosen)


def _pair(argument: str) -> list[str]:
    name, equals, value = argument.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{argument!r} is not NAME=VALUE")
    return [name, value]


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specgate", description="Patches an SGLang installation and proves it."
    )
    parser.add_argument("--version", action="version", version=f"specgate {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, operation in COMMANDS.items():
        said = (operation.__doc__ or "").splitlines()[0]
        _add_options(commands.add_parser(name, help=said, description=said), name)
    # the gates on a running server need more of the standard library; starting must stay fast
    if not arguments or arguments[0] in SERVING or arguments[0].startswith("-"):
        from . import serving

        serving.add_arguments(commands)
    return parser


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--store", metavar="DIR", default=DEFAULT_STORE, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print the JSON document")
    if command == "history":
        parser.add_argument("--last", type=int, metavar="N", help="only the last N operations")
        return
    parser.add_argument("--root", metavar="DIR", help="the folder that holds sglang/ and its dist-info")
    parser.add_argument("--python", metavar="PY", help="the server's own interpreter")
    parser.add_argument("--bundle", metavar="FILE", help="rendered bundle; - for standard input")
    parser.add_argument(
        "--env",
        metavar="NAME=VALUE",
        type=_pair,
        action="append",
        help="environment for the server's interpreter; repeatable",
    )
    parser.add_argument(
        "--pristine",
        metavar="PATH=SHA256",
        type=_pair,
        action="append",
        help="sha256 of a pristine file, where neither RECORD nor git knows it; repeatable",
    )
    if command in ("apply", "verify"):
        parser.add_argument("--no-import", action="store_true", help="leave out the import and flag gates")
        parser.add_argument(
            "--import-timeout", type=float, metavar="S", help="seconds for one import, default 180"
        )
    if command == "apply":
        parser.add_argument(
            "--accept-unknown-code", action="store_true", help="patch code of unknown fingerprint"
        )
    if command in ("backup", "apply", "rollback"):
        parser.add_argument("--check", action="store_true", help="change nothing, say what would change")
    if command in ("apply", "verify", "rollback"):
        parser.add_argument("--diff", action="store_true", help="show the unified source diff")
    parser.add_argument("--actor", metavar="WHO", help="for the audit log; default the sudo or login user")
    parser.add_argument("--run-id", metavar="ID", help="for the audit log; default random")
