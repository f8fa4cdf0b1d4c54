"""Runs inside the server's own interpreter, as ``PY -c TEXT``, on any Python from 3.8.

It takes one JSON request on standard input and writes one JSON answer on the standard output it was
started with. The engine reads this file as text; importing it does nothing.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import io
import json
import linecache
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


def locate(request: Any) -> Any:
    """Say where this interpreter finds SGLang, without importing it (that takes seconds)."""
    spec = importlib.util.find_spec("sglang")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return {
        "executable": sys.executable,
        "version": "{}.{}.{}".format(*sys.version_info[:3]),
        "prefix": sys.prefix,
        "sys_path": [os.path.realpath(folder) for folder in sys.path if Path(folder).is_dir()],
        "sglang": folders[0] if folders else None,
    }


class Staged(importlib.machinery.SourceFileLoader):
    """Loads a module from staged bytes as if they lay at the module's own path already."""

    def __init__(self, name: str, path: str, data: bytes) -> None:
        super().__init__(name, path)
        self.data = data

    def get_code(self, name: str) -> Any:
        return compile(self.data, self.path, "exec", dont_inherit=True)

    def get_data(self, path: Any) -> bytes:
        return self.data if path == self.path else super().get_data(path)


class Finder:
    """Puts the staged modules in front of whatever this interpreter would have imported."""

    def __init__(self, modules: Any) -> None:
        self.modules = {module["name"]: module for module in modules}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        module = self.modules.get(name)
        if module is None:
            return None
        data = base64.b64decode(module["staged"])
        file = module["file"]
        # decorators such as triton.jit read their own source while they are imported
        lines = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="replace").readlines()
        linecache.cache[file] = (len(data), None, lines, file)
        package = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, file, loader=Staged(name, file, data), submodule_search_locations=package
        )


def import_all(request: Any) -> Any:
    """Import the modules, say which file each came from, and then try the flag."""
    seen: list[str] = []

    def remember(
        message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None
    ) -> None:
        seen.append("{}: {}".format(category.__name__, " ".join(str(message).split())))

    warnings.showwarning = remember
    staged = [module for module in request["modules"] if module.get("staged")]
    if staged:
        sys.meta_path.insert(0, Finder(staged))
    answer: dict[str, Any] = {"modules": [], "flag": [], "warnings": seen}
    for wanted in request["modules"]:
        found = import_one(wanted)
        answer["modules"].append(found)
        if found["error"]:
            return answer
    if request.get("flag"):
        try:
            answer["flag"] = try_flag(request["flag"])
        except BaseException as error:
            answer["flag"] = [{"ok": False, "line": f"cannot be tried: {type(error).__name__}: {error}"}]
    return answer


def import_one(wanted: Any) -> Any:
    found: dict[str, Any] = {
        "name": wanted["name"],
        "file": None,
        "sha256": None,
        "stale": False,
        "error": None,
    }
    try:
        module = importlib.import_module(wanted["name"])
    except BaseException:
        # SystemExit too: a module that exits while it is imported would end the server
        found["error"] = traceback.format_exc().rstrip().splitlines()
        return found
    found["file"] = os.path.realpath(str(module.__file__))
    if wanted.get("staged"):
        return found
    data = Path(found["file"]).read_bytes()
    found["sha256"] = hashlib.sha256(data).hexdigest()
    cached = getattr(module, "__cached__", None)
    if cached and Path(cached).exists():
        loader: Any = module.__spec__ and module.__spec__.loader
        loaded = loader.get_code(wanted["name"])
        found["stale"] = loaded != compile(data, str(module.__file__), "exec", dont_inherit=True)
    return found


def try_flag(flag: Any) -> Any:
    """Parse the flag as the server's command line would, and say what came of each value."""
    server_args = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser(prog="sglang")
    server_args.ServerArgs.add_cli_args(parser)
    validate = None
    if flag.get("validator"):
        module, function = flag["validator"].split(":")
        validate = getattr(importlib.import_module(module), function)

    def parse(text: str) -> Any:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                space = parser.parse_args(["--model-path", "x", "{}={}".format(flag["option"], text)])
        except SystemExit:
            lines = said.getvalue().strip().splitlines() or ["refused"]
            raise ValueError(lines[-1].split("error: ", 1)[-1]) from None
        return getattr(space, flag["field"])

    return [accepted(flag, text, wanted, parse, validate) for text, wanted in flag["accept"]] + [
        refused(flag, text, parse, validate) for text in flag.get("refuse", [])
    ]


def accepted(flag: Any, text: str, wanted: Any, parse: Any, validate: Any) -> Any:
    """Say whether ``text`` parses to the wanted value, of the wanted type."""
    try:
        value = parse(text)
        good = value == wanted and type(value) is type(wanted)
        if good and validate:
            validate(value)
    except Exception as error:
        return {"ok": False, "line": "{} {} was refused: {}".format(flag["option"], text, error)}
    line = "{} {} gives {}={!r} ({})".format(flag["option"], text, flag["field"], value, type(value).__name__)
    return {"ok": good, "line": line if good else f"{line}, not {wanted!r}"}


def refused(flag: Any, text: str, parse: Any, validate: Any) -> Any:
    """Say whether ``text`` is refused, by the parser or by the validator."""
    try:
        value = parse(text)
        if validate:
            validate(value)
    except ValueError as error:
        return {"ok": True, "line": "{} {} is refused: {}".format(flag["option"], text, error)}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return {"ok": False, "line": "{} {} broke the validation: {}".format(flag["option"], text, said)}
    line = "{} {} was accepted as {!r}, must be refused".format(flag["option"], text, value)
    return {"ok": False, "line": line}


def main() -> None:
    request = json.load(sys.stdin)
    # what an import prints must not mix with the answer
    answer_to = os.dup(1)
    os.dup2(2, 1)
    # -c puts the working folder first on the path; a server started by its unit has no such entry
    sys.path[:] = [folder for folder in sys.path if folder]
    answer = {"locate": locate, "import": import_all}[request["do"]](request)
    sys.stdout.flush()
    sys.stderr.flush()
    data = json.dumps(answer).encode("ascii")
    while data:
        data = data[os.write(answer_to, data) :]
    # libraries that were imported may keep threads; there is nothing left to wait for
    os._exit(0)


if __name__ == "__main__":
    main()
