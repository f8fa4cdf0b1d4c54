"""Fixtures of the engine's tests: a virtual environment that holds the small real sglang."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from specgate import operations
from specgate.options import Options

from tests.unit.engine import mini


@dataclass
class Host:
    """One host's worth of state: a virtual environment with SGLang in it, and a store."""

    venv: Path
    store: Path
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @cached_property
    def root(self) -> Path:
        return mini.site(self.venv)

    def options(self, **changes: Any) -> Options:
        """Return options for this host; ``bundle`` is the ordinary one unless given."""
        chosen: dict[str, Any] = {"python": str(self.python), "store": str(self.store), "actor": "tester"}
        return Options(**{**chosen, **self.defaults, **changes})

    def apply(self, bundle: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        return operations.apply(self.options(bundle=bundle or mini.bundle(), **changes))

    def rollback(self, **changes: Any) -> dict[str, Any]:
        return operations.rollback(self.options(**changes))

    def verify(self, **changes: Any) -> dict[str, Any]:
        return operations.verify(self.options(**changes))

    def inspect(self, **changes: Any) -> dict[str, Any]:
        return operations.inspect(self.options(**changes))

    def status(self, **changes: Any) -> dict[str, Any]:
        return operations.status(self.options(**changes))

    def path(self, relative: str) -> Path:
        return self.root / relative

    def tree(self) -> dict[str, str]:
        return mini.digest_of(self.root)


@pytest.fixture(scope="session")
def installed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment into which pip installed the mini wheel; copied for each test."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "v"], check=True, timeout=120)
    mini.pip(folder / "v" / "bin" / "python", "install", "--no-index", str(mini.wheel(folder)))
    return folder / "v"


@pytest.fixture
def host(installed_once: Path, tmp_path: Path) -> Host:
    """Return a host of one's own: the same installation, fresh and pristine."""
    shutil.copytree(installed_once, tmp_path / "venv", symlinks=True)
    return Host(tmp_path / "venv", tmp_path / "store")
