"""The engine as one zip file: the same source gives the same bytes, and any Python runs them."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

from controller import archive


def test_same_source_same_bytes(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "specgate"
    shutil.copytree(archive.ENGINE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file in copy.iterdir():  # what differs from checkout to checkout
        file.chmod(0o600)
        os.utime(file, (2_000_000_000, 2_000_000_000))
    assert archive.engine(copy) == archive.engine()


def test_other_source_other_bytes(tmp_path: Path) -> None:
    copy = tmp_path / "specgate"
    shutil.copytree(archive.ENGINE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "errors.py").write_text((copy / "errors.py").read_text() + "\n")
    assert archive.engine(copy) != archive.engine()


def test_runs_from_the_zip_alone(tmp_path: Path) -> None:
    packed = tmp_path / "specgate.pyz"
    packed.write_bytes(archive.engine())
    done = subprocess.run(
        ["/usr/bin/python3", "-I", packed, "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "specgate"), done.stderr


def test_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    packed = tmp_path / "specgate.pyz"
    packed.write_bytes(archive.engine())
    with zipfile.ZipFile(packed) as archived:
        names = set(archived.namelist())
    assert names == {"__main__.py"} | {f"specgate/{file.name}" for file in archive.ENGINE.glob("*.py")}
