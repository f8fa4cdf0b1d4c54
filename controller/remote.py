"""Runs commands and the engine on one host over one SSH connection, and on many hosts at once.

The engine travels with the command: one execution whose standard input carries the engine's arguments, its
zip file and the bundle. It is never a file on the host, so nothing goes stale there and nobody else can plant
one; the command line is always the same, so no argument reaches a shell or the host's process list.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import paramiko

from . import archive
from .connect import CONNECT_TIMEOUT, HostError, connect, reason
from .fleet import Host

DEADLINE = 1800  # seconds for one command
PARALLEL = 32  # hosts at a time

T = TypeVar("T")
Document = dict[str, Any]

# An anonymous file in memory serves as the zip file, since Python imports from paths only. -I keeps the
# working folder off the module path: with sudo, a file in the login user's home would else run as root.
BOOT = """\
import json, os, runpy, sys
head = json.loads(sys.stdin.buffer.readline())
engine = os.memfd_create("specgate.pyz")
with open(engine, "wb", closefd=False) as file:
    file.write(sys.stdin.buffer.read(head["size"]))
sys.argv[1:] = head["arguments"]
runpy.run_path("/proc/%d/fd/%d" % (os.getpid(), engine), run_name="__main__")
"""


@dataclass(frozen=True)
class Answer:
    """What a command wrote, and its exit code."""

    code: int
    stdout: bytes
    stderr: str


class Session(Protocol):
    """A way to run commands on a host."""

    host: Host

    def execute(self, words: Sequence[str], data: bytes = b"", become: str | None = None) -> Answer:
        """Run a command, as ``become`` if given, with ``data`` on its standard input. Raises HostError."""


class Local:
    """The controller itself as a host (``ansible_connection: local``)."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def execute(self, words: Sequence[str], data: bytes = b"", become: str | None = None) -> Answer:
        """Run a command here."""
        if become is not None and become != getpass.getuser():
            words = _sudo(words, become)
        try:
            done = subprocess.run(words, input=data, capture_output=True, timeout=DEADLINE)
        except OSError as error:
            return Answer(127, b"", f"{words[0]}: {error.strerror}")
        except subprocess.TimeoutExpired as error:
            raise HostError(f"no end after {DEADLINE} s: {words[0]}", "look at the host", "failed") from error
        return Answer(done.returncode, done.stdout, done.stderr.decode("utf-8", "replace"))


class Remote:
    """A host over one Fabric connection."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.connection = connect(host)

    def execute(self, words: Sequence[str], data: bytes = b"", become: str | None = None) -> Answer:
        """Run a command there, in a channel of its own on the one connection."""
        if become is not None and become != self.connection.user:
            words = _sudo(words, become)
        try:
            return self._execute(shlex.join(words), data)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise HostError(
                f"connection lost ({reason(error)})",
                "what ran there ends or is undone by itself; when the host is back: "
                f"fab status --hosts {shlex.quote(self.host.name)}",
            ) from error

    def close(self) -> None:
        """Close the connection, from any thread; a command that still runs over it raises HostError."""
        self.connection.client.close()

    def _execute(self, line: str, data: bytes) -> Answer:
        """Run a command line. (Fabric's run() sends standard input as text, in pieces with pauses.)"""
        channel = self.connection.transport.open_session(timeout=CONNECT_TIMEOUT)
        deadline = threading.Timer(DEADLINE, self.close)
        deadline.daemon = True
        deadline.start()
        errors: list[bytes] = []
        reader = threading.Thread(target=lambda: errors.extend(_drain(channel.recv_stderr)), daemon=True)
        try:
            channel.exec_command(line)
            reader.start()
            with contextlib.suppress(OSError):  # it may end without reading; its exit code says why
                channel.sendall(data)
                channel.shutdown_write()
            out = b"".join(_drain(channel.recv))
            reader.join()
            code = channel.recv_exit_status()
            if code == -1:  # paramiko's word for a channel that ended without an exit status
                late = deadline.finished.is_set()
                raise EOFError(f"no end after {DEADLINE} s" if late else "no exit status")
        finally:
            deadline.cancel()
            channel.close()
        return Answer(code, out, b"".join(errors).decode("utf-8", "replace"))


@contextlib.contextmanager
def session(host: Host) -> Iterator[Session]:
    """Open a session on a host and close it afterwards. Raises HostError."""
    if host.local:
        yield Local(host)
        return
    remote = Remote(host)
    with _open_lock:
        _open.add(remote)
    try:
        yield remote
    finally:
        with _open_lock:
            _open.discard(remote)
        remote.close()


def engine(here: Session, command: Sequence[str], bundle: bytes | None = None) -> Document:
    """Run an engine command on a host and return its document: one execution. Raises HostError."""
    packed = archive.engine()
    arguments = [*command, "--json", *(["--bundle", "-"] if bundle is not None else [])]
    head = json.dumps({"size": len(packed), "arguments": arguments}).encode()  # ASCII, one line
    words = [here.host.python, "-I", "-c", BOOT]
    answer = here.execute(words, b"%b\n%b%b" % (head, packed, bundle or b""), here.host.become)
    try:
        document = json.loads(answer.stdout)
        if not isinstance(document, dict):
            raise ValueError
    except ValueError:
        raise _no_document(here.host, command[0], answer) from None
    return document


def each(
    hosts: Sequence[Host],
    work: Callable[[Host], T],
    failed: Callable[[Host, HostError], T],
    done: Callable[[Host, T, int], None] = lambda host, result, left: None,
) -> dict[str, T]:
    """Work on all hosts at once; return the results by name, in the order of ``hosts``.

    A host that raises HostError gets ``failed`` and the others go on. ``done`` is called in this thread as
    each host ends, with the number of hosts that still work.
    """
    results: dict[str, T] = {}
    pool = ThreadPoolExecutor(max_workers=min(PARALLEL, len(hosts)), thread_name_prefix="host")
    waiting = {pool.submit(_isolated, host, work, failed): host for host in hosts}
    try:
        for count, future in enumerate(as_completed(waiting), 1):
            host = waiting[future]
            results[host.name] = future.result()
            done(host, results[host.name], len(hosts) - count)
    except BaseException:  # ^C too: no thread may go on waiting for its host
        for future in waiting:
            future.cancel()
        _close_all()
        raise
    finally:
        pool.shutdown(wait=True)
    return {host.name: results[host.name] for host in hosts}


def actor() -> str:
    """Return who works, for the audit log: the user behind sudo, else the login user, as the playbooks do."""
    return os.environ.get("SUDO_USER") or os.environ.get("USER") or getpass.getuser()


_open: set[Remote] = set()
_open_lock = threading.Lock()


def _close_all() -> None:
    with _open_lock:
        for remote in _open:
            remote.close()


def _isolated(host: Host, work: Callable[[Host], T], failed: Callable[[Host, HostError], T]) -> T:
    try:
        return work(host)
    except HostError as error:
        return failed(host, error)


def _sudo(words: Sequence[str], user: str) -> list[str]:
    return ["sudo", "-n", "-u", user, "--", *words]


def _drain(receive: Callable[[int], bytes]) -> Iterator[bytes]:
    while block := receive(65536):
        yield block


def _no_document(host: Host, command: str, answer: Answer) -> HostError:
    """Explain an execution that did not end in a document."""
    lines = [line for line in answer.stderr.splitlines() if line.strip()] or ["it wrote nothing"]
    text = lines[-1]
    if lines[0].startswith(("sudo:", "Sorry, user")) and "command not found" not in lines[0]:
        return HostError(
            f"sudo refused: {lines[0].removeprefix('sudo: ')}",
            f"let the login user run commands as {host.become} without a password (NOPASSWD)",
            "failed",
        )
    if answer.code in (126, 127) or "command not found" in text or text.endswith("No such file or directory"):
        return HostError(
            f"interpreter {host.python} cannot be run: {text}",
            "correct ansible_python_interpreter (Python 3.9 or later)",
            "failed",
        )
    return HostError(
        f"{command} gave no document (exit code {answer.code}): {text}",
        "run it there by hand (docs/engine.md); an older Python than 3.9 is one cause",
        "failed",
    )
