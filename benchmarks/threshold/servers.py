"""Start, watch and stop SGLang servers, each in a process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ServerError(RuntimeError):
    """A server did not start or died; the message holds the end of its log."""


def request(port: int, path: str, payload: Any = None, timeout: float = 300) -> Any:
    """Send one request to a local server and return the decoded answer (`None` for an empty one).

    A `payload` makes it a POST. Raises `urllib.error.URLError` or `OSError` when the server cannot be reached.
    """
    data = None if payload is None else json.dumps(payload).encode()
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
    with urllib.request.urlopen(call, timeout=timeout) as answer:
        body = answer.read()
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body.decode(errors="replace")


@dataclass
class Server:
    """One `sglang.launch_server` process.

    `pythonpath` goes in front of the interpreter's own packages, for an SGLang that is unpacked, not installed.
    """

    name: str
    port: int
    arguments: list[str]
    logs: Path
    python: str
    pythonpath: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    healthy_after: float | None = None

    @property
    def log(self) -> Path:
        """Where the server's output goes."""
        return self.logs / f"{self.name}.log"

    @property
    def command(self) -> list[str]:
        """The exact command line."""
        return [
            self.python,
            "-m",
            "sglang.launch_server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *self.arguments,
        ]

    def describe(self) -> dict[str, Any]:
        """What a reader needs in order to start the same server again."""
        return {
            "name": self.name,
            "command": shlex.join(self.command),
            "environment": self.environment,
            "healthy_after_s": self.healthy_after,
        }

    def start(self) -> None:
        """Start the process; does not wait."""
        environment = os.environ | self.environment
        if self.pythonpath:
            environment["PYTHONPATH"] = self.pythonpath
        self.logs.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self, deadline: float) -> None:
        """Wait until the server answers `/health`; `deadline` is in seconds of `time.monotonic()`.

        Raises `ServerError` when it died or was not healthy in time.
        """
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise ServerError(f"{self.name} died while starting:\n{self.tail()}")
            try:
                request(self.port, "/health", timeout=5)
            except OSError:
                time.sleep(0.5)
                continue
            self.healthy_after = round(time.monotonic() - self.started, 1)
            return
        raise ServerError(f"{self.name} was not healthy in time:\n{self.tail()}")

    def tail(self, characters: int = 3000) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""

    def information(self) -> dict[str, Any]:
        """The server's own account of its arguments and state (`/server_info`, or its older name)."""
        for path in ("/server_info", "/get_server_info"):
            try:
                return request(self.port, path, timeout=30)
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
        raise ServerError(f"{self.name} has no information endpoint")

    def threshold_state(self) -> dict[str, Any] | None:
        """The patch's counters (`threshold`, `plain_steps`, `switches` …); `None` when no threshold is in force."""
        for state in self.information().get("internal_states") or []:
            if state.get("batch_threshold"):
                return state["batch_threshold"]
        return None

    def stop(self) -> None:
        """End the whole process group: schedulers outlive their launcher and would hold the GPU."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(timeout=8)
            except subprocess.TimeoutExpired:
                continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None


def start_all(servers: list[Server], timeout: float) -> dict[str, str]:
    """Start all `servers` at once and wait; return the reason of each that failed, by name. `timeout` in seconds."""
    for server in servers:
        server.start()
    deadline = time.monotonic() + timeout
    failures = {}
    for server in servers:
        try:
            server.wait(deadline)
        except ServerError as error:
            failures[server.name] = str(error)
            server.stop()
    return failures
