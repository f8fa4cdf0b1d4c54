"""What an operator may ask for."""

from __future__ import annotations

import getpass
import os
import secrets
from dataclasses import dataclass, field
from typing import Any, Callable

DEFAULT_STORE = "/var/lib/specgate"


def default_actor() -> str:
    """Return who is at work: the user behind sudo, else the login user."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _no_step(name: str) -> None:
    pass


@dataclass
class Options:
    """One field for each command-line option (docs/engine.md says what they mean).

    ``bundle`` is a path, ``-`` for standard input, or the bundle itself. ``on_step`` is called with the
    name of each step of a transaction as it is reached; the accident tests kill the engine there.
    """

    root: str | None = None
    python: str | None = None
    bundle: str | dict[str, Any] | None = None
    store: str = DEFAULT_STORE
    no_import: bool = False
    env: dict[str, str] = field(default_factory=dict)
    import_timeout: float = 180.0
    accept_unknown_code: bool = False
    pristine: dict[str, str] = field(default_factory=dict)
    actor: str = field(default_factory=default_actor)
    run_id: str = field(default_factory=lambda: secrets.token_hex(6))
    check: bool = False
    diff: bool = False
    last: int | None = None
    on_step: Callable[[str], None] = _no_step
