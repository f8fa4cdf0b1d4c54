"""A small real distribution called sglang: a wheel with a RECORD, which pip installs.

Its two modules have the shapes that the patch of 0.5.9 looks for; importing them takes milliseconds.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specgate import bundle as bundles

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "plugins" / "module_utils"
SERVER_ARGS = "sglang/srt/server_args.py"
WORKER = "sglang/srt/speculative/eagle_worker_v2.py"
CREATED = "sglang/srt/speculative/batch_threshold.py"
FIELD = "speculative_disable_batch_threshold"
OPTION = "--speculative-disable-batch-threshold"

_SERVER_ARGS = '''\
"""Command line of the server."""
import argparse
import dataclasses
import warnings

warnings.warn("cuda.cudart is deprecated", FutureWarning)


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0
    speculative_token_map: str = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser):
        parser.add_argument("--model-path", type=str, required=True)
        parser.add_argument(
            "--speculative-accept-threshold-single",
            type=float,
            default=ServerArgs.speculative_accept_threshold_single,
        )
        parser.add_argument(
            "--speculative-accept-threshold-acc",
            type=float,
            default=ServerArgs.speculative_accept_threshold_acc,
        )
        parser.add_argument("--speculative-token-map", type=str)


def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(argv)
'''
_WORKER = '''\
"""The speculative worker."""
from sglang.srt.server_args import ServerArgs


class EAGLEWorkerV2:
    def __init__(self, server_args: ServerArgs):
        self.server_args = server_args

    def forward_batch_generation(self, batch):
        if batch.is_extend:
            return self.prefill(batch)
        else:
            drafts = self.draft(batch)
            return self.verify(batch, drafts)
'''


def files(version: str) -> dict[str, str]:
    """Return the package's files; those of another version differ a little."""
    changed = "" if version == "0.5.9" else f"# as of {version}\n"
    return {
        "sglang/__init__.py": "",
        "sglang/version.py": f'__version__ = "{version}"\n',
        "sglang/srt/__init__.py": "",
        SERVER_ARGS: changed + _SERVER_ARGS,
        "sglang/srt/speculative/__init__.py": "",
        WORKER: changed + _WORKER,
    }


def wheel(folder: Path, version: str = "0.5.9", replace: Mapping[str, str] | None = None) -> Path:
    """Build the wheel of ``version`` in ``folder``; ``replace`` gives other text for some files."""
    info = f"sglang-{version}.dist-info"
    content = {**files(version), **(replace or {})}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    content[f"{info}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = []
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(text.encode())}\n")
    content[f"{info}/RECORD"] = "".join(record) + f"{info}/RECORD,,\n"
    target = folder / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return target


def pip(python: Path, *arguments: str) -> None:
    """Run pip on the environment of ``python``, offline."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "-q",
            "--disable-pip-version-check",
            "--python",
            str(python),
            *arguments,
        ],
        check=True,
        timeout=120,
        capture_output=True,
    )


def site(venv: Path) -> Path:
    """Return the site-packages of a virtual environment."""
    return next((venv / "lib").glob("python3*/site-packages"))


def record_sha256(root: Path, path: str) -> str | None:
    """Return the hex sha256 that RECORD states for ``path``, read without the engine."""
    info = next(root.glob("sglang-*.dist-info"))
    for line in (info / "RECORD").read_text().splitlines():
        name, digest, _ = line.rsplit(",", 2)
        if name == path and digest:
            text = digest.removeprefix("sha256=")
            return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    return None


def sha256sum(path: Path) -> str:
    """Return what coreutils say the sha256 of a file is."""
    done = subprocess.run(["sha256sum", "--", str(path)], check=True, capture_output=True, text=True)
    return done.stdout.split()[0].lstrip("\\")


def digest_of(root: Path) -> dict[str, str]:
    """Return path → sha256 of every file below ``root`` but bytecode, as ``sha256sum`` sees it."""
    command = ["find", ".", "-type", "f", "-not", "-name", "*.pyc", "-exec", "sha256sum", "{}", "+"]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return {line[66:]: line[:64] for line in done.stdout.splitlines()}


CREATE_TEXT = """\
def check_threshold(value):
    if value < 0:
        raise ValueError(f"must be 0 or more, got {value}")
    return value
"""


FLAG_TEXT = f'parser.add_argument(\n    "{OPTION}",\n    type=int,\n    default=ServerArgs.{FIELD},\n)'
BRANCH_TEXT = f"if len(batch) > self.server_args.{FIELD} > 0:\n    return self.plain(batch)"


def bundle(**changes: Any) -> dict[str, Any]:
    """Return the rendered bundle for the mini package; keyword arguments replace its top-level keys."""
    document: dict[str, Any] = {
        "specgate_bundle": 1,
        "name": "speculative-disable-batch-threshold",
        "version": "1.0.0",
        "title": "Plain decoding above a batch size",
        "variants": [
            {
                "id": "plain",
                "sglang": ["0.5.9"],
                "files": [
                    {
                        "path": SERVER_ARGS,
                        "module": "sglang.srt.server_args",
                        "markers": [FIELD, OPTION],
                        "marker_lines": 3,
                        "edits": [
                            {
                                "id": "field",
                                "place": "after",
                                "text": f"{FIELD}: int = 0  # 0 = always speculate",
                                "at": [
                                    {"class": "ServerArgs"},
                                    {"field": "speculative_accept_threshold_acc"},
                                ],
                            },
                            {
                                "id": "flag",
                                "place": "after",
                                "text": FLAG_TEXT,
                                "at": [
                                    {"class": "ServerArgs"},
                                    {"def": "add_cli_args"},
                                    {"call": "*.add_argument", "first": "--speculative-accept-threshold-acc"},
                                ],
                            },
                        ],
                    },
                    {
                        "path": CREATED,
                        "module": "sglang.srt.speculative.batch_threshold",
                        "create": CREATE_TEXT,
                    },
                    {
                        "path": WORKER,
                        "module": "sglang.srt.speculative.eagle_worker_v2",
                        "markers": ["check_threshold", FIELD],
                        "marker_lines": 2,
                        "edits": [
                            {
                                "id": "import",
                                "place": "after",
                                "at": [{"import": "ServerArgs"}],
                                "text": "from sglang.srt.speculative.batch_threshold import check_threshold",
                            },
                            {
                                "id": "branch",
                                "place": "first",
                                "text": BRANCH_TEXT,
                                "at": [
                                    {"class": "EAGLEWorkerV2"},
                                    {"def": "forward_batch_generation"},
                                    {"if": "*.is_extend*", "branch": "else"},
                                ],
                            },
                        ],
                    },
                ],
            }
        ],
        "flag": {
            "option": OPTION,
            "field": FIELD,
            "accept": [["8", 8], ["0", 0]],
            "refuse": ["-1", "abc"],
            "validator": "sglang.srt.speculative.batch_threshold:check_threshold",
        },
    }
    document.update(changes)
    document["sha256"] = bundles.digest(document)
    return document


def altered(change: Any) -> dict[str, Any]:
    """Return the bundle after ``change(variant)``, with its digest made right."""
    document = bundle()
    change(document["variants"][0])
    document["sha256"] = bundles.digest(document)
    return document
