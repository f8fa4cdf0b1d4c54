"""The accidents happen on the engine's own test installation."""

from tests.unit.engine.conftest import host, installed_once

__all__ = ["host", "installed_once"]
