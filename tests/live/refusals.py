"""Say what the server's own argument checks make of command lines: `python refusals.py < cases.json`.

Runs inside an SGLang environment. A case is a list of arguments; the answer is `null` when they are accepted,
else the kind of error and its text.
"""

from __future__ import annotations

import json
import sys

from sglang.srt.server_args import prepare_server_args


def verdict(arguments: list[str]) -> list[str] | None:
    try:
        args = prepare_server_args(arguments)
        args.resolve_once()
        args.check_server_args()
    except (Exception, SystemExit) as error:
        return [type(error).__name__, str(error)]
    return None


if __name__ == "__main__":
    answers = [verdict(arguments) for arguments in json.load(sys.stdin)]
    print(json.dumps(answers))
