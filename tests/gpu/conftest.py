"""Servers for the GPU tests: the user's own SGLang, several small servers side by side on one GPU.

`SPECGATE_GPU_PYTHON`       interpreter whose SGLang is patched (default: the one that runs pytest)
`SPECGATE_GPU_PYTHONPATH`   put in front of its packages, for an SGLang that is unpacked and not installed
`SPECGATE_GPU_BACKEND`      attention backend (default triton)
`SPECGATE_GPU_ENVIRONMENT`  `NAME=VALUE` pairs for the servers, separated by blanks
                            (SGLANG_ENABLE_SPEC_V2=1 is set for you up to 0.5.10)
`SPECGATE_GPU_TP`           GPUs a server (tensor parallelism, default 1)
`SPECGATE_GPU_LOGS`         where the servers' logs go (default: a temporary folder)
`SPECGATE_GPU_PORT`         the first of about ten ports (default 32000)
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from benchmarks.threshold.servers import Server, start_all
from tests.gpu.gpu_servers import (
    BACKEND,
    ENVIRONMENT,
    PYTHON,
    PYTHONPATH,
    SERVERS,
    SPECULATION,
    common_arguments,
    environment,
    release,
)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, so that `pytest -m gpu` selects it."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


# what the run was about, for the matrix
SEEN: dict[str, str] = {}
OUTCOMES: dict[str, bool] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what came of each test here."""
    report = yield
    if HERE in item.path.parents and (report.when == "call" or report.failed):
        OUTCOMES[item.name] = OUTCOMES.get(item.name, True) and not report.failed
    return report


def pytest_sessionfinish() -> None:
    """Write into the matrix (docs/matrix.md) what a run that crossed the threshold proved."""
    if "test_tokens_across_the_threshold" not in OUTCOMES:
        return
    try:
        from controller import matrix
        from controller.render import render
    except ImportError:
        print("the controller's packages are missing here: the matrix stays as it was")
        return
    bundle, version = render(), SEEN["version"]
    files = [file for v in bundle["variants"] if version in v["sglang"] for file in v["files"]]
    if SEEN["text"] not in [file.get("create") for file in files]:
        print("the patch under test is not the one that is rendered now: the matrix stays as it was")
        return
    where = f"tests/gpu, {len(OUTCOMES)} tests, {BACKEND}, {SEEN['gpu']}"
    matrix.record("live-gpu", version, bundle, all(OUTCOMES.values()), where)


@pytest.fixture(scope="session")
def sglang() -> str:
    """The version of a patched SGLang on a machine with a GPU; skips, saying what is missing, otherwise."""
    code = (
        "import json, importlib.metadata as m, importlib.util as u, pathlib, torch\n"
        "gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None\n"
        "found = u.find_spec('sglang.srt.speculative.batch_threshold')\n"
        "text = pathlib.Path(found.origin).read_text(encoding='utf-8') if found else None\n"
        "print(json.dumps([gpu, m.version('sglang'), text]))"
    )
    answer = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"{PYTHON} has no SGLang with torch ({reason}); set SPECGATE_GPU_PYTHON")
    gpu, version, text = json.loads(answer.stdout.strip().splitlines()[-1])
    if gpu is None:
        pytest.skip("torch sees no GPU here")
    if text is None:
        pytest.skip(f"the SGLang {version} of {PYTHON} is not patched: run `fab patch` first")
    SEEN.update(gpu=gpu, version=version, text=text)
    return str(version)


@pytest.fixture(scope="session")
def servers(
    sglang: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """All servers that the selected tests name, started at once."""
    wanted = [
        name
        for name in SERVERS
        if any(name in getattr(item, "fixturenames", ()) for item in request.session.items)
    ]
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([PYTHON, str(HERE / "lag_model.py"), str(folder)], check=True, env=environment())
    extra = dict(pair.split("=", 1) for pair in os.environ.get("SPECGATE_GPU_ENVIRONMENT", "").split())
    if release(sglang) <= (0, 5, 10):
        extra.setdefault("SGLANG_ENABLE_SPEC_V2", "1")
    logs = Path(os.environ.get("SPECGATE_GPU_LOGS") or tmp_path_factory.mktemp("logs"))
    first = int(os.environ.get("SPECGATE_GPU_PORT", "32000"))
    running = {}
    for offset, name in enumerate(wanted):
        target, arguments = SERVERS[name]
        common = common_arguments(sglang, folder / target)
        if SPECULATION[0] in arguments:
            arguments = [*arguments, "--speculative-draft-model-path", str(folder / "draft")]
        running[name] = Server(
            name,
            first + 10 * offset,
            common + arguments,
            logs,
            PYTHON,
            PYTHONPATH,
            extra | ENVIRONMENT.get(name, {}),
        )
    failed = start_all(
        list(running.values()), timeout=float(os.environ.get("SPECGATE_GPU_START_TIMEOUT", "300"))
    )
    for name, reason in failed.items():
        print(f"server {name!r} did not start:\n{reason}")
        del running[name]
    yield running
    for server in running.values():
        server.stop()


def one(name: str) -> object:
    """A fixture for one of the servers."""

    @pytest.fixture(name=name)
    def fixture(servers: dict[str, Server]) -> Server:
        if name not in servers:
            pytest.fail(f"the server {name!r} did not start; its log is printed above")
        return servers[name]

    return fixture


plain, threshold, zero = one("plain"), one("threshold"), one("zero")
clean, paged, retracting = one("clean"), one("paged"), one("retracting")
