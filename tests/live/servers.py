"""Real SGLang servers on the CPU, from a copy of the wheel that the engine has patched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specgate import operations
from specgate.options import Options

HEALTHY_AFTER = 600  # seconds; 20 on an idle machine with two cores
SPECULATION = (
    "--speculative-algorithm=EAGLE3",
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
)
# speculation on the CPU needs this backend; given as a pair, SGLang leaves it alone on a CPU without AMX
BACKEND = ("--prefill-attention-backend=intel_amx", "--decode-attention-backend=intel_amx")


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens to generate after it, greedily; under a regular expression, at most as many."""

    prompt: tuple[int, ...]
    count: int
    regex: str | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Its sampling parameters, as SGLang's /generate takes them."""
        end = {"regex": self.regex} if self.regex else {"ignore_eos": True}
        return {"temperature": 0, "max_new_tokens": self.count, **end}


def copy_of_package(environment: Path, root: Path) -> Path:
    """Make ``root`` a folder with SGLang's package and metadata of an environment, as hard links."""
    packages = next(environment.glob("lib/python3.*/site-packages"))
    root.mkdir(parents=True)
    for part in ("sglang", next(packages.glob("sglang-*.dist-info")).name):
        linked = subprocess.run(["cp", "-al", packages / part, root], capture_output=True)
        if linked.returncode:  # another filesystem
            subprocess.run(["cp", "-a", packages / part, root], check=True)
    return root


def patch(root: Path, bundle: dict[str, Any]) -> None:
    """Put the bundle on the SGLang at ``root``; AssertionError with the engine's words when it is refused."""
    document = operations.apply(Options(root=str(root), bundle=bundle, store=f"{root}.store", no_import=True))
    assert document["outcome"] == "passed", document


def free_port() -> int:
    """Return a free port that leaves SGLang room: it listens at this one plus 10000 too."""
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
            if port < 50000:
                return port


# shared memory of its own: what a server that is killed leaves there goes with it
PRIVATE_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


class Server:
    """A server in a session of its own, so that all of its processes end with it."""

    def __init__(
        self, environment: Path, root: Path, log: Path, target: Path, *arguments: str, ranks: int = 1
    ) -> None:
        self.port = free_port()
        self.log = log
        command = [
            *PRIVATE_MEMORY,
            str(environment / "bin/python"),
            "-m",
            "sglang.launch_server",
            f"--model-path={target}",
            "--host=127.0.0.1",
            f"--port={self.port}",
            "--device=cpu",
            "--mem-fraction-static=0.1",
            "--random-seed=1",
            "--sleep-on-idle",
            f"--tp-size={ranks}",
            *BACKEND,
            *arguments,
        ]
        settings = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        if ranks > 1:
            settings["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))  # a core for each
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + HEALTHY_AFTER
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.words()[-3000:]}"
            try:
                with urllib.request.urlopen(self.url("/health"), timeout=20):
                    return
            except OSError:
                time.sleep(1)
        raise AssertionError(f"not healthy after {HEALTHY_AFTER} s:\n{self.words()[-3000:]}")

    def stop(self) -> None:
        """End all of its processes; asked politely, SGLang takes five seconds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)

    def words(self) -> str:
        """What the server has said so far."""
        return self.log.read_text(errors="replace")

    def said(self, text: str, after: int, seconds: float = 120) -> bool:
        """Wait until the server says ``text`` behind the ``after``-th character; False when it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if text in self.words()[after:]:
                return True
            time.sleep(0.05)
        return False

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read()[:500]!r}") from error
        return json.loads(text) if text else None

    def generate(self, requests: Iterable[Request], **more: Any) -> list[dict[str, Any]]:
        """Generate for all requests in one call, so that they start together."""
        listed = list(requests)
        prompts, sampling = [list(one.prompt) for one in listed], [one.sampling for one in listed]
        return self.call("/generate", {"input_ids": prompts, "sampling_params": sampling, **more})

    def generate_in_turn(self, requests: Iterable[Request], gap: float) -> list[dict[str, Any]]:
        """Generate for each request in a call of its own, each `gap` seconds after the one before."""

        def late(one: Request, seconds: float) -> dict[str, Any]:
            time.sleep(seconds)
            return self.generate([one])[0]

        return together(*(partial(late, one, gap * turn) for turn, one in enumerate(requests)))

    def state(self) -> dict[str, Any]:
        return self.call("/server_info")["internal_states"][0]

    def steps(self) -> dict[str, int]:
        return self.state()["batch_threshold"]


class Steps:
    """Counts a server's plain and speculative steps inside a `with`."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def __enter__(self) -> Steps:
        self.before = self.server.steps()
        return self

    def __exit__(self, *_: object) -> None:
        after = self.server.steps()
        self.plain, self.speculative, self.switches = (
            after[key] - self.before[key] for key in ("plain_steps", "speculative_steps", "switches")
        )


def together(*calls: Any) -> list[Any]:
    """Run functions at the same time and return what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def every(seconds: float, action: Any, until: threading.Event) -> None:
    """Repeat an action until the event is set."""
    while not until.is_set():
        action()
        time.sleep(seconds)
