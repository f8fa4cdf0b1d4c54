"""What the tests of the patch share: the bundle, trees from the real wheels, the engine as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import matrix
from controller.render import dump, render
from tests import wheels

ENGINE = Path(__file__).resolve().parents[2] / "plugins" / "module_utils"
BUNDLE = render()
VARIANTS = {variant["id"]: variant for variant in BUNDLE["variants"]}
VERSIONS = {version: variant for variant in VARIANTS.values() for version in variant["sglang"]}


@pytest.fixture(scope="session")
def bundle_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rendered bundle as a file."""
    path = tmp_path_factory.mktemp("bundle") / "bundle.json"
    path.write_text(dump(BUNDLE), encoding="utf-8")
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str], Path]:
    """Make a tree with the files of one version that the patch touches, straight from its wheel."""

    def make(version: str) -> Path:
        paths = {file["path"] for file in VERSIONS[version]["files"]}
        return wheels.unpack(version, tmp_path / "tree", paths)

    return make


@pytest.fixture
def specgate(tmp_path: Path, bundle_file: Path) -> Callable[..., dict[str, Any]]:
    """Run the engine, as its command, on a tree; return its document with the exit code that it left."""

    def run(command: str, root: Path, *options: str) -> dict[str, Any]:
        with_bundle = ["--bundle", str(bundle_file)] if command != "rollback" else []
        no_import = ["--no-import"] if command != "rollback" else []
        where = ["--root", str(root), "--store", str(tmp_path / "store"), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "specgate", command, *where, *with_bundle, *no_import, *options],
            env={**os.environ, "PYTHONPATH": str(ENGINE)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout, done.stderr
        document = json.loads(done.stdout)
        assert document["exit_code"] == done.returncode
        return document

    return run


OUTCOME = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Keep whether the test itself passed, for the fixtures that end after it."""
    report = yield
    if report.when == "call":
        item.stash[OUTCOME] = report.passed
    return report


@pytest.fixture
def proves(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """Write into the matrix (docs/matrix.md) what comes of a test that says: this proves LEVEL of VERSION."""
    claims: list[tuple[str, str]] = []
    yield lambda level, version: claims.append((level, version))
    for level, version in claims:
        where = request.node.nodeid.split("[")[0]
        matrix.record(level, version, BUNDLE, request.node.stash.get(OUTCOME, False), where)
