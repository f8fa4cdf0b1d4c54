"""Installs, starts and removes a systemd unit: checked before it is written, started until it serves."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from . import fs, journalctl, systemd

FOLDER = Path("/etc/systemd/system")
_NAME = re.compile(r"[A-Za-z0-9:_.@-]+\.service")


class UnitError(Exception):
    """A unit is wrong, or would not start. The text says why, with the traceback where there is one."""


@dataclass
class Result:
    """What was done, or would be done: ``before`` and ``after`` are the unit's text."""

    changed: bool = False
    restarted: bool = False
    before: str = ""
    after: str = ""
    warnings: list[str] = field(default_factory=list)


def start(name: str, content: str, exposure: int, restart: bool, check: bool, timeout: float) -> Result:
    """Install the unit, enable it, and start it; restart it when its text changed or with ``restart``.

    A unit that systemd has anything to say about, or whose exposure (``systemd-analyze security``) is above
    the limit, is not installed. With ``check`` nothing is changed. ``timeout`` in seconds is for the start.
    Raises UnitError.
    """
    path = _path(name)
    before = _text(path)
    result = Result(before=before, after=content, warnings=verify(name, content, exposure))
    written, unit = before != content, systemd.show(name)
    running = unit is not None and unit.loaded and unit.active == "active"
    enabled = _run("systemctl", "is-enabled", "--quiet", name).returncode == 0
    result.restarted = running and (written or restart)
    result.changed = written or not enabled or not running or restart
    if check:
        return result
    if written:
        fs.replace_atomically(path, content.encode("utf-8"), lambda step: None)
    if result.changed:
        _demand("systemctl", "daemon-reload")
        if not enabled:
            _demand("systemctl", "enable", "--quiet", name)
        # earlier failures do not count against this start
        _run("systemctl", "reset-failed", name)
        _begin(name, "restart" if written or restart else "start", timeout)
    return result


def remove(name: str, check: bool, timeout: float) -> Result:
    """Stop the unit, and remove it. Drop-ins are not ours and stay. Raises UnitError."""
    path = _path(name)
    before = _text(path)
    result = Result(changed=path.exists(), before=before)
    if check or not result.changed:
        return result
    _demand("systemctl", "disable", "--now", "--quiet", name, timeout=timeout)
    path.unlink()
    fs.sync_folder(path.parent)
    _demand("systemctl", "daemon-reload")
    _run("systemctl", "reset-failed", name)
    return result


def managed(mark: str) -> list[str]:
    """Return the names of the units whose text holds ``mark``."""
    return sorted(
        path.name for path in FOLDER.glob("*.service") if not path.is_symlink() and mark in _text(path)
    )


def verify(name: str, content: str, exposure: int) -> list[str]:
    """Raise UnitError for whatever systemd says of the unit; return what it says of other units.

    systemd-analyze ends with 0 even for ``Type=bogus``, which it ignores: its output counts, not its exit code.
    """
    with tempfile.TemporaryDirectory(prefix="specgate-unit-") as folder:
        path = Path(folder, name)
        path.write_text(content, encoding="utf-8")
        said = _run("systemd-analyze", "--no-pager", "verify", str(path))
        lines = [line.strip() for line in (said.stdout + said.stderr).splitlines() if line.strip()]
        own = [line for line in lines if name in line or ".service" not in line]
        if own:
            shown = "\n".join(line.replace(f"{folder}/", "") for line in own)
            raise UnitError(f"systemd would not take {name} as it is; it was not installed:\n{shown}")
        options = ("security", "--no-pager", "--offline=true", f"--threshold={exposure}", str(path))
        said = _run("systemd-analyze", *options)
        if said.returncode != 0:
            verdict = (said.stdout + said.stderr).strip().splitlines()[-1:]
            limit = f"{exposure / 10:.1f}"
            raise UnitError(f"{name} is more exposed than {limit}; it was not installed: {' '.join(verdict)}")
    return [line for line in lines if line not in own]


def _begin(name: str, verb: str, timeout: float) -> None:
    """Start or restart; raise UnitError with why the server died."""
    try:
        done = _run("systemctl", verb, name, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise UnitError(f"{name} has not started within {timeout:.0f} s") from error
    if done.returncode == 0:
        return
    unit = systemd.show(name)
    entries = journalctl.read(name)
    # nobody waits for a server that has just failed to start: the retries would come in between a rollback
    if unit and unit.sub == "auto-restart":
        _run("systemctl", "stop", name)
    own = journalctl.cause(journalctl.words(journalctl.of_last_start(entries)))
    gates = [entry.message for entry in entries if entry.message.startswith(journalctl.PREFIX)][-1:]
    said = [text.replace(journalctl.PREFIX, "") for text in gates]
    if not said and not own:
        ending = (unit and unit.ending) or "its end is not known"
        own = [f"{ending}; its journal is empty: is the disk full (df -h /var/log/journal /run/log/journal)?"]
    raise UnitError("\n".join([f"{name} did not start: {unit.result if unit else 'unknown'}", *said, *own]))


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise UnitError(f"{name!r} is no name of a service unit")
    return FOLDER / name


def _text(path: Path) -> str:
    data = fs.read(path)
    return "" if data is None else data.decode("utf-8", "replace")


def _run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
    except OSError as error:
        raise UnitError(f"{command[0]} cannot be run: {error.strerror}") from error


def _demand(*command: str, timeout: float = 120) -> None:
    done = _run(*command, timeout=timeout)
    if done.returncode != 0:
        raise UnitError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
