"""Asks the server's own Python interpreter: where SGLang is, and whether the patched modules import."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import inside  # noqa: F401  (read as text below; the import makes Ansible ship it)
from .errors import Refused

LOCATE_TIMEOUT = 60.0


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and what it says about SGLang; ``sglang`` is the folder it would import."""

    path: str
    version: str
    prefix: str
    sys_path: list[str]
    sglang: str | None


class NoAnswer(Exception):
    """The interpreter ended, or was ended, without an answer; ``lines`` are the last it wrote."""

    def __init__(self, reason: str, lines: list[str]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lines = lines


@dataclass(frozen=True)
class Answer:
    """An interpreter's answer, and what it wrote to standard error meanwhile."""

    value: dict[str, Any]
    stderr: list[str]


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the interpreter: ours without PYTHON*, plus ``extra``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env.update(extra)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return env


def find(python: str) -> str:
    """Return the path of an interpreter given as path or name, or refuse it.

    Symbolic links stay: through them an interpreter knows its virtual environment.
    """
    found = shutil.which(python) if os.sep not in python else python
    remedy = "give the server's own interpreter: --python /path/to/venv/bin/python"
    if found is None or not os.path.lexists(found):
        raise Refused(f"interpreter {python} does not exist", remedy)
    path = Path(found)
    if not path.exists():
        raise Refused(f"interpreter {python} is a link to {path.readlink()}, which does not exist", remedy)
    if not path.is_file():
        raise Refused(f"interpreter {python} is not a file", remedy)
    if not os.access(found, os.X_OK):
        raise Refused(f"interpreter {python} is not executable", remedy)
    return str(path.absolute())


def ask(python: str, env: Mapping[str, str]) -> Interpreter:
    """Ask an interpreter where SGLang is. Raises Refused when it is none or does not answer."""
    path = find(python)
    try:
        said = run(path, {"do": "locate"}, env, LOCATE_TIMEOUT).value
        return Interpreter(path, said["version"], said["prefix"], said["sys_path"], said["sglang"])
    except (NoAnswer, KeyError) as error:
        lines = error.lines if isinstance(error, NoAnswer) else []
        said_last = f": {lines[-1]}" if lines else ""
        raise Refused(
            f"{python} does not answer as a Python interpreter{said_last}",
            f"try it by hand: {path} -c 'import sys; print(sys.version)'",
        ) from error


def run(python: str, request: Mapping[str, Any], env: Mapping[str, str], timeout: float) -> Answer:
    """Send ``request`` to inside.py in a fresh interpreter and return its answer. Raises NoAnswer."""
    text = (pkgutil.get_data(__package__, "inside.py") or b"").decode("utf-8")
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [python, "-B", "-c", text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(env),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise NoAnswer(f"cannot be started: {error.strerror}", [str(error.strerror)]) from error
        try:
            out = process.communicate(json.dumps(request).encode("ascii"), timeout)[0]
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        errors.seek(0)
        lines = errors.read().decode("utf-8", "replace").splitlines()
    if late:
        raise NoAnswer(f"gave no answer within {timeout:g} s", lines[-10:])
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        raise NoAnswer(f"was ended by {name}{hint}", lines[-10:])
    try:
        value = json.loads(out.decode("ascii"))
    except ValueError:
        value = None
    if process.returncode != 0 or not isinstance(value, dict):
        raise NoAnswer(f"ended with exit code {process.returncode} and no answer", lines[-10:])
    return Answer(value, lines)


def normal(line: str) -> str:
    """Return a log line without what differs from run to run, so that two runs can be compared."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", line).strip()
