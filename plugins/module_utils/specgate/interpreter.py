"""Asks the server's own Python interpreter: where SGLang is, and whether the patched modules import."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
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


def owner(folders: Iterable[str]) -> pwd.struct_passwd | None:
    """Return the first owner of a folder who is not root, when we are; None when there is none.

    Root does not run what somebody else can change: that somebody would be root then.
    """
    if os.geteuid() != 0:
        return None
    for folder in folders:
        found = Path(folder).stat()
        if found.st_uid != 0:
            try:
                return pwd.getpwuid(found.st_uid)
            except KeyError:
                name = str(found.st_uid)
                return pwd.struct_passwd((name, "", found.st_uid, found.st_gid, "", "/", ""))
    return None


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
        with Asking(path, {"do": "locate"}, env, LOCATE_TIMEOUT) as asking:
            said = asking.answer().value
        return Interpreter(path, said["version"], said["prefix"], said["sys_path"], said["sglang"])
    except (NoAnswer, KeyError) as error:
        lines = error.lines if isinstance(error, NoAnswer) else []
        said_last = f": {lines[-1]}" if lines else ""
        raise Refused(
            f"{python} does not answer as a Python interpreter{said_last}",
            f"try it by hand: {path} -c 'import sys; print(sys.version)'",
        ) from error


class Asking:
    """A request to inside.py in a fresh interpreter that runs meanwhile; leaving the context ends it.

    It runs as the owner of the interpreter's folder, or of ``package``, when root asks and that is not root.
    """

    def __init__(
        self,
        python: str,
        request: Mapping[str, Any],
        env: Mapping[str, str],
        timeout: float,
        package: str | None = None,
    ) -> None:
        """Start the interpreter; when that fails, ``answer`` says so."""
        text = (pkgutil.get_data(__package__, "inside.py") or b"").decode("utf-8")
        user = owner([str(Path(python).parent), *([package] if package else [])])
        self._timeout = timeout
        self._until = time.monotonic() + timeout
        self._process: subprocess.Popen[bytes] | None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed on leaving the context)
        # a file, not a pipe: an interpreter that never reads must not block us
        with tempfile.TemporaryFile() as question:
            question.write(json.dumps(request).encode("ascii"))
            question.seek(0)
            try:
                self._process = subprocess.Popen(
                    [python, "-B", "-c", text],
                    stdin=question,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env=environment({**_home(user), **env}),
                    cwd="/",
                    start_new_session=True,
                    **_identity(user),
                )
            except OSError as error:
                self._process = None
                self._failure = f"{error.strerror}" + (f" (as user {user.pw_name})" if user else "")

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *exception: object) -> None:
        # also what it started; but once it was waited for, its number may belong to somebody else
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        self._errors.close()

    def answer(self) -> Answer:
        """Wait for the answer. Raises NoAnswer when none comes in time, or none at all."""
        if self._process is None:
            raise NoAnswer(f"cannot be started: {self._failure}", [self._failure])
        try:
            out = self._process.communicate(timeout=max(0.0, self._until - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"gave no answer within {self._timeout:g} s", self._stderr()[-10:]) from None
        code = self._process.returncode
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            raise NoAnswer(f"was ended by {signal.Signals(-code).name}{hint}", self._stderr()[-10:])
        value = None
        with contextlib.suppress(ValueError):
            value = json.loads(out.decode("ascii"))
        if code != 0 or not isinstance(value, dict):
            raise NoAnswer(f"ended with exit code {code} and no answer", self._stderr()[-10:])
        return Answer(value, self._stderr())

    def _stderr(self) -> list[str]:
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace").splitlines()


def _home(user: pwd.struct_passwd | None) -> dict[str, str]:
    return {} if user is None else {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}


def _identity(user: pwd.struct_passwd | None) -> dict[str, Any]:
    """Return what makes Popen run as ``user``, with the groups that a login would give."""
    if user is None:
        return {}
    groups = os.getgrouplist(user.pw_name, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}


def normal(line: str) -> str:
    """Return a log line without what differs from run to run, so that two runs can be compared."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", line).strip()
