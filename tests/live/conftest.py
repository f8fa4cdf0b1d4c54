"""Servers that the live tests share: one SGLang version, patched, with a draft that is really accepted."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.render import render
from tests.hosts import models as tiny_models
from tests.live.servers import SPECULATION, Request, Server, copy_of_package, patch

HERE = Path(__file__).resolve().parent
VERSIONS = ("0.5.23", "0.5.19")
# Tensor-parallel ranks of the servers: with two, ranks that took different sides of the threshold would wait for
# each other forever. Two cost two cores: the last of the old workers and one of the new have them.
RANKS = {
    "0.5.23": 1,
    "0.5.19": 2,
    "0.5.9": 1,
    "0.5.11": 1,
    "0.5.12.post1": 1,
    "0.5.13.post1": 2,
}
LONGEST = 200


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def environment(version: str, sglang: Callable[[str], Path]) -> Path:
    return sglang(version)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "live"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return ``folder``, filled by the first worker that asks."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = folder.with_suffix(".new")
            new.mkdir()
            make(new)
            new.rename(folder)
    return folder


@pytest.fixture(scope="session")
def models(sglang: Callable[[str], Path], shared: Path) -> Path:
    """A folder with `target` (and its tokenizer), `draft` and `first.json`."""
    environment = sglang(VERSIONS[0])

    def make(folder: Path) -> None:
        command = [environment / "bin/python", HERE / "permutation_model.py", folder, "float32"]
        subprocess.run(command, check=True)
        # its vocabulary is of the same size
        for file in (tiny_models.build(environment) / "llama").glob("tokenizer*"):
            shutil.copy(file, folder / "target")

    return once(shared / "models", make)


@pytest.fixture(scope="module")
def patched(version: str, environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the patched package."""
    root = copy_of_package(environment, tmp_path_factory.mktemp("package") / version)
    patch(root, render())
    return root


@pytest.fixture(scope="module")
def start(
    environment: Path, patched: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """A function that starts a server with these further arguments; it ends with the module's tests."""
    running: list[Server] = []

    def start(
        *arguments: str, root: Path = patched, target: Path = models / "target", ranks: int = 1
    ) -> Server:
        log = tmp_path_factory.mktemp("server") / "log"
        server = Server(environment, root, log, target, *arguments, ranks=ranks)
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def speculation(models: Path) -> tuple[str, ...]:
    """The arguments of a server that speculates."""
    draft = f"--speculative-draft-model-path={models / 'draft'}"
    return (*SPECULATION, draft, "--grammar-backend=xgrammar", "--sampling-backend=pytorch")


@pytest.fixture(scope="session")
def generated(sglang: Callable[[str], Path], models: Path, shared: Path) -> dict[str, list[dict[str, Any]]]:
    """What transformers generates greedily, `free` and under a `grammar`; reference.py says what is in it."""

    def make(folder: Path) -> None:
        done = subprocess.run(
            [sglang(VERSIONS[0]) / "bin/python", HERE / "reference.py", models / "target", str(LONGEST)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        (folder / "generated.json").write_text(done.stdout)

    found: dict[str, list[dict[str, Any]]] = json.loads(
        (once(shared / "generated", make) / "generated.json").read_text()
    )
    return found


@pytest.fixture(scope="session")
def reference(generated: dict[str, list[dict[str, Any]]]) -> dict[tuple[int, ...], dict[str, Any]]:
    """For each of eight prompts what transformers generates: `tokens` and `logprobs`."""
    return {tuple(one["prompt"]): one for one in generated["free"]}


@pytest.fixture(scope="session")
def prompts(reference: dict[tuple[int, ...], dict[str, Any]]) -> list[tuple[int, ...]]:
    return list(reference)


@pytest.fixture(scope="session")
def same_tokens(
    reference: dict[tuple[int, ...], dict[str, Any]],
) -> Callable[[Request, dict[str, Any]], None]:
    """A function that fails when an answer is not, token by token, what the model alone generates."""

    def check(request: Request, answer: dict[str, Any]) -> None:
        assert answer["output_ids"] == reference[request.prompt]["tokens"][: request.count]

    return check


@pytest.fixture(scope="session")
def draft_steps(
    models: Path, reference: dict[tuple[int, ...], dict[str, Any]]
) -> Callable[[Request, int], int]:
    """A function: how many steps a request takes that speculates after its first ``start`` tokens.

    The draft proposes ``first[first[t]]``, t being the token before the last, for each of its three tokens.
    """
    first = json.loads((models / "first.json").read_text())

    def count(request: Request, start: int) -> int:
        tokens, steps, known = reference[request.prompt]["tokens"], 0, start
        while known < request.count:
            before = tokens[known - 2] if known > 1 else request.prompt[-1]
            proposed, accepted = first[first[before]], 0
            while accepted < 3 and tokens[known + accepted] == proposed:
                accepted += 1
            known, steps = known + accepted + 1, steps + 1
        return steps

    return count
