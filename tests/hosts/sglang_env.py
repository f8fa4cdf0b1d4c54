"""Builds SGLang environments for a machine without GPU: `python tests/hosts/sglang_env.py VERSION …` prints their folders.

The real SGLang from PyPI, its files as in the wheel's RECORD, over CPU PyTorch. What PyPI does not have for the CPU is in `shims/`.
An environment is a virtual environment of Debian's python3, made once and kept in the user's cache; test hosts see it at /opt/sglang.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specgate" / "envs"
# hosts hide /usr/local and the home folders: their interpreter is the system's
PYTHON = "/usr/bin/python3"


def versions() -> list[str]:
    """The SGLang versions that can be built: those with a file in `requirements/`."""
    return sorted(p.name.removesuffix(".txt") for p in (HERE / "requirements").glob("0.*.txt"))


def build(version: str) -> Path:
    """Return the environment's folder, building it when it is missing or its recipe has changed.

    Raises ValueError for a version without requirements, CalledProcessError when pip fails. Takes 1 to 2 minutes; 2 GB.
    """
    if version not in versions():
        raise ValueError(f"SGLang {version} has no file in {HERE / 'requirements'}; there are {', '.join(versions())}")
    return _made(f"sglang-{version}", _recipe(version), lambda env: _fill(env, version))


def _recipe(version: str) -> str:
    files = [HERE / "requirements" / "base.txt", HERE / "requirements" / f"{version}.txt", Path(__file__)]
    files += sorted((HERE / "shims").rglob("*.py"))
    return "\n".join(file.read_text() for file in files)


def _fill(env: Path, version: str) -> None:
    base = _made("base", (HERE / "requirements" / "base.txt").read_text(), _fill_base)
    # hard links: PyTorch and Triton are on the disk once
    subprocess.run(["cp", "-al", f"{base}/.", str(env)], check=True)
    wanted = HERE / "requirements" / f"{version}.txt"
    alone = [line.removeprefix("#alone ") for line in wanted.read_text().splitlines() if line.startswith("#alone ")]
    _pip(env, "-r", str(wanted), "-c", str(HERE / "requirements" / "base.txt"))
    _pip(env, "--no-deps", f"sglang=={version}", *alone)
    packages = next(env.glob("lib/python3.*/site-packages"))
    shutil.copytree(HERE / "shims", packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "README.md"))
    _let_torchvision_load(packages / "torchvision" / "__init__.py")
    subprocess.run([env / "bin/python", "-m", "compileall", "-q", "-j2", str(packages / "sglang" / "srt")], check=False)


def _let_torchvision_load(init: Path) -> None:
    """PyPI's torchvision finds no CUDA library beside a CPU PyTorch, and then misses the operators that its own code describes."""
    init.write_text(
        "import torch\n"
        "_operators = torch.library.Library('torchvision', 'FRAGMENT')\n"
        "for _name in ('nms', 'qnms'):\n"
        "    _operators.define(_name + '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n" + init.read_text()
    )


def _fill_base(env: Path) -> None:
    subprocess.run([PYTHON, "-m", "venv", str(env)], check=True)
    _pip(env, "-r", str(HERE / "requirements" / "base.txt"))


def _pip(env: Path, *arguments: str) -> None:
    command = [env / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _made(name: str, recipe: str, fill: object) -> Path:
    """Return CACHE/name, made by ``fill`` under another name first, so that a killed build leaves nothing half done."""
    done = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = done / "specgate-recipe"
        if stamp.exists() and stamp.read_text() == recipe:
            return done
        new = CACHE / f"{name}.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        fill(new)  # type: ignore[operator]
        (new / "specgate-recipe").write_text(recipe)
        shutil.rmtree(done, ignore_errors=True)
        new.rename(done)
        return done


def main() -> int:
    """Build the environments named on the command line."""
    for version in sys.argv[1:] or versions():
        print(build(version), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
