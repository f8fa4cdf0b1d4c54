"""Starts SGLang as ``python -m sglang.launch_server`` does, with two differences.

The API key comes from systemd's credential ``api_key``: it stands in no argument list, and is not shown where
SGLang logs its arguments. And a flag that a patch adds is left out, with a word in the journal, when this
SGLang does not know it: a rolled-back host must start again as it was before the patch.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parent)


class Secret(str):
    """A string that is not shown when what holds it is printed for debugging."""

    def __repr__(self):
        return "'***'"


def known_flags(server_args):
    """Return the flags that this SGLang takes."""
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    return set(parser._option_string_actions)


def without(arguments, flags):
    """Return the arguments without these flags and their values."""
    kept, skipping = [], False
    for argument in arguments:
        if argument.startswith("--"):
            skipping = argument.partition("=")[0] in flags
        if not skipping:
            kept.append(argument)
    return kept


def main():
    """Prepare the arguments, then become the server."""
    # Subprocesses import Secret from here; it must not stand in front of the server's own packages.
    sys.path[:] = [folder for folder in sys.path if folder != FOLDER] + [FOLDER]
    from sglang.srt import server_args
    from sglang_launch import Secret

    optional = set(os.environ.pop("SGLANG_LAUNCH_PATCH_FLAGS", "").split())
    unknown = optional - known_flags(server_args) if optional else set()
    arguments = without(sys.argv[1:], unknown)
    for flag in sorted(unknown & {argument.partition("=")[0] for argument in sys.argv[1:]}):
        print(
            f"specgate: SGLang here is not patched and does not know {flag}: starting without it", flush=True
        )
    sys.argv[1:] = arguments

    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    key = Path(folder, "api_key") if folder else None
    if key and key.exists():
        prepare, secret = server_args.prepare_server_args, Secret(key.read_text().strip())

        def prepare_with_key(argv):
            prepared = prepare(argv)
            prepared.api_key = secret
            return prepared

        server_args.prepare_server_args = prepare_with_key
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
