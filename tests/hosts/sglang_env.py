"""Builds SGLang environments for a machine without GPU: `python tests/hosts/sglang_env.py VERSION …`.

The real SGLang from PyPI, its files as in the wheel's RECORD, over CPU PyTorch. What PyPI does not have for
the CPU is in `shims/`. An environment is a virtual environment of Debian's python3, made once and kept in the
user's cache; test hosts see it at /opt/sglang. Its folder's name holds a digest of how it was made: a changed
recipe makes a new one and leaves alone what a host may stand on.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import inspect
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS, SHIMS = HERE / "requirements", HERE / "shims"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specgate" / "envs"
# hosts hide /usr/local and the home folders: their interpreter is the system's
PYTHON = Path("/usr/bin/python3")


def versions() -> list[str]:
    """The SGLang versions that can be built: those with a file in `requirements/`."""
    return sorted(p.name.removesuffix(".txt") for p in REQUIREMENTS.glob("0.*.txt"))


def build(version: str) -> Path:
    """Return the environment's folder, building it when there is none by today's recipe.

    Raises ValueError for a version without requirements, CalledProcessError when pip fails. Takes a minute;
    the first takes 2.4 GB of disk, each other one 0.3 GB.
    """
    if version not in versions():
        raise ValueError(f"SGLang {version} has no file in {REQUIREMENTS}; there are {', '.join(versions())}")
    return _made(environment(version), lambda new: _fill(new, version))


def environment(version: str) -> Path:
    """The folder of the environment, built or not."""
    shims = (path for path in sorted(SHIMS.rglob("*")) if path.suffix in (".py", ".pth"))
    parts = [REQUIREMENTS / f"{version}.txt", *shims]
    return _named(f"sglang-{version}", _base().name, *parts, _fill, _pip, _let_torchvision_load)


def _base() -> Path:
    return _named("base", str(PYTHON.resolve()), REQUIREMENTS / "base.txt", _fill_base)


def _named(name: str, *recipe: str | Path | Callable[..., None]) -> Path:
    digest = hashlib.sha256()
    for part in recipe:
        text = (
            part
            if isinstance(part, str)
            else part.read_text()
            if isinstance(part, Path)
            else inspect.getsource(part)
        )
        digest.update(text.encode() + b"\0")
    return CACHE / f"{name}-{digest.hexdigest()[:8]}"


def _fill(new: Path, version: str) -> None:
    base = _made(_base(), _fill_base)
    # hard links: PyTorch and Triton are on the disk once
    subprocess.run(["cp", "-al", f"{base}/.", str(new)], check=True)
    _pip(new, "--no-deps", "-r", str(REQUIREMENTS / f"{version}.txt"))
    packages = next(new.glob("lib/python3.*/site-packages"))
    shutil.copytree(
        SHIMS, packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "README.md")
    )
    _let_torchvision_load(packages / "torchvision" / "__init__.py")
    for package in ("torchvision", *(shim.name for shim in SHIMS.iterdir() if shim.is_dir())):
        subprocess.run([new / "bin/python", "-m", "compileall", "-q", str(packages / package)], check=True)


def _let_torchvision_load(init: Path) -> None:
    """Without CUDA, PyPI's torchvision cannot load its library and misses operators that it describes."""
    init.write_text(
        "import torch\n"
        "if not torch.backends.cuda.is_built():\n"
        "    _operators = torch.library.Library('torchvision', 'FRAGMENT')\n"
        "    for _name in ('nms', 'qnms'):\n"
        "        _operators.define(_name + '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        + init.read_text()
    )


def _fill_base(new: Path) -> None:
    subprocess.run([PYTHON, "-m", "venv", str(new)], check=True)
    _pip(new, "-r", str(REQUIREMENTS / "base.txt"))


def _pip(new: Path, *arguments: str) -> None:
    # pip compiles what it installs: hosts have it read-only and could not keep the bytecode
    command = [str(new / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True, stdin=subprocess.DEVNULL)


def _made(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return ``folder``, made by ``fill`` under another name first: a killed build leaves no half of one."""
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = folder.with_name(f"{folder.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            fill(new)
            new.rename(folder)
    return folder


def prune() -> list[Path]:
    """Remove, and return, what today's recipes do not make; only while no test host stands on any of it."""
    wanted = {_base(), *map(environment, versions())}
    wanted |= {path.with_name(f"{path.name}.lock") for path in wanted}
    removed = sorted(set(CACHE.glob("*")) - wanted)
    for path in removed:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return removed


def main() -> int:
    """Build the environments named on the command line, or remove outdated ones."""
    parser = argparse.ArgumentParser(
        description="Build SGLang environments for the CPU; prints their folders."
    )
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"one of {', '.join(versions())}; default all"
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="remove outdated ones instead (only while no test host is up)",
    )
    options = parser.parse_args()
    if options.prune:
        made = prune()
    else:
        with ThreadPoolExecutor(2) as pool:  # pip computes on one core
            made = list(pool.map(build, options.versions or versions()))
    print(*made, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
