"""The launcher: the key arrives and is not shown, and a flag of the patch is left out where SGLang does not know it."""

from __future__ import annotations

import copy
import hmac
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

FILES = Path(__file__).resolve().parents[2] / "roles" / "sglang_server" / "files"
sys.path.append(str(FILES))

import sglang_launch  # noqa: E402

# As SGLang does: the arguments are logged, and go to a subprocess, which logs them as well.
PACKAGE = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/server_args.py": """
import argparse, dataclasses

@dataclasses.dataclass
class ServerArgs:
    model_path: str = ""
    api_key: str = None

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path")
        FLAG

def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs(parser.parse_args(argv).model_path)
""",
    "launch_server.py": """
import multiprocessing, os, sys
from sglang.srt.server_args import prepare_server_args

def scheduler(args):
    print("scheduler", args, args.api_key == "s3" + "cret", os.environ.get("SGLANG_LAUNCH_PATCH_FLAGS"), flush=True)

if __name__ == "__main__":
    args = prepare_server_args(sys.argv[1:])
    print("server", args, sys.argv[1:], f"Bearer {args.api_key}" == "Bearer s3cret", flush=True)
    child = multiprocessing.get_context("spawn").Process(target=scheduler, args=(args,))
    child.start()
    child.join()
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("FLAG", ""))
    return tmp_path


def launch(package: Path, *arguments: str, key: str | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package)}
    environment["SGLANG_LAUNCH_PATCH_FLAGS"] = "--speculative-disable-batch-threshold"
    if key:
        (package / "api_key").write_text(key + "\n")
        environment["CREDENTIALS_DIRECTORY"] = str(package)
    done = subprocess.run(
        [sys.executable, str(FILES / "sglang_launch.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_key_arrives_everywhere_and_is_shown_nowhere(package: Path) -> None:
    said = launch(package, "--model-path", "m", key="s3cret")
    assert "s3cret" not in said
    assert said.splitlines() == [
        "server ServerArgs(model_path='m', api_key='***') ['--model-path', 'm'] True",
        "scheduler ServerArgs(model_path='m', api_key='***') True None",
    ]


def test_without_a_key_there_is_none(package: Path) -> None:
    assert "api_key=None" in launch(package, "--model-path", "m")


def test_a_flag_that_this_sglang_does_not_know_is_left_out_and_told(package: Path) -> None:
    said = launch(package, "--speculative-disable-batch-threshold", "16", "--model-path", "m")
    assert said.startswith("specgate: SGLang here is not patched")
    assert "['--model-path', 'm']" in said


def test_a_flag_that_it_knows_stays(package: Path) -> None:
    args = package / "sglang" / "srt" / "server_args.py"
    text = PACKAGE["srt/server_args.py"]
    args.write_text(text.replace("FLAG", "parser.add_argument('--speculative-disable-batch-threshold')"))
    said = launch(package, "--speculative-disable-batch-threshold", "16", "--model-path", "m")
    assert "['--speculative-disable-batch-threshold', '16', '--model-path', 'm']" in said
    assert "not patched" not in said


def test_another_unknown_flag_is_an_error(package: Path) -> None:
    with pytest.raises(AssertionError, match="unrecognized arguments"):
        launch(package, "--model-path", "m", "--nonsense", "1")


def test_a_secret_stays_one() -> None:
    secret = sglang_launch.Secret("s3cret")
    for one in (secret, copy.deepcopy(secret), pickle.loads(pickle.dumps(secret))):
        assert repr(one) == "'***'"
        assert f"{one}" == "s3cret"
    assert hmac.compare_digest("s3cret", secret)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--a", "1", "--b", "2"], ["--b", "2"]),
        (["--a=1", "--b", "2"], ["--b", "2"]),
        (["--b", "2", "--a", "1"], ["--b", "2"]),
        (["--a", "--b"], ["--b"]),
        (["--ab", "1"], ["--ab", "1"]),
    ],
)
def test_without(arguments: list[str], kept: list[str]) -> None:
    assert sglang_launch.without(arguments, {"--a"}) == kept
