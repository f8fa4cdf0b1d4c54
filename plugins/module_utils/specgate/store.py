"""The store: pristine bytes, applied bundles, and for each installation its state, journal and lock.

docs/engine.md describes the folder. Nothing in it is ever overwritten by something else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import fs
from .bundle import Bundle, parse
from .errors import Refused

FOLDER_MODE = 0o755


class Store:
    """The folder that ``--store`` names. Creating the object reads and writes nothing."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self.objects = self.path / "objects"
        self.drift = self.path / "drift"
        self.audit = self.path / "audit.jsonl"

    def ensure(self) -> None:
        """Make the folder, and refuse one that others could write to. Raises Refused."""
        try:
            self.path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            mode = self.path.stat().st_mode
        except OSError as error:
            raise Refused(
                f"the store {self.path} cannot be made: {error.strerror}",
                "run as root, or give another folder with --store",
            ) from error
        if mode & stat.S_IWOTH:
            raise Refused(
                f"the store {self.path} can be written by everyone, so nothing in it can be trusted",
                f"chmod o-w {self.path}",
            )
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise Refused(f"the store {self.path} cannot be written", "run as root, or give another --store")

    def object_path(self, digest: str) -> Path:
        """Return where the pristine bytes with this sha256 lie."""
        return self.objects / digest[:2] / digest

    def object(self, digest: str) -> bytes | None:
        """Return pristine bytes by sha256; None when the store has none, or has them damaged."""
        data = fs.read(self.object_path(digest))
        return data if data is not None and fs.sha256(data) == digest else None

    def bundle(self, digest: str) -> dict[str, Any] | None:
        """Return a bundle that was applied, by its sha256."""
        with contextlib.suppress(ValueError):
            return fs.read_json(self.path / "bundles" / f"{digest}.json")
        return None

    def bundles(self) -> Iterator[Bundle]:
        """Return every bundle that was applied and is intact."""
        for path in sorted((self.path / "bundles").glob("*.json")):
            document = self.bundle(path.stem)
            if document is not None:
                with contextlib.suppress(Refused):
                    yield parse(document, path.name)

    def installation(self, identity: str) -> InstallationStore:
        """Return the part of the store that belongs to one installation."""
        return InstallationStore(self, self.path / "installations" / identity)


class InstallationStore:
    """One installation's state, journal and lock."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.state_path = folder / "state.json"
        self.journal_path = folder / "journal.json"
        self.transaction = folder / "transaction"

    def state(self) -> dict[str, Any] | None:
        """Return what is applied, or None. Raises Refused when the file is damaged."""
        return self._json(self.state_path)

    def journal(self) -> dict[str, Any] | None:
        """Return the unfinished transaction, or None. Raises Refused when the file is damaged."""
        return self._json(self.journal_path)

    def _json(self, path: Path) -> dict[str, Any] | None:
        try:
            return fs.read_json(path)
        except ValueError as error:
            raise Refused(f"{path} is damaged: {error}", "keep a copy, then remove it") from error
        except PermissionError as error:
            raise Refused(f"{path} cannot be read: {error.strerror}", "run as root") from error

    def put_object(self, data: bytes, step: fs.StepHook) -> str:
        """Keep pristine bytes, once, verified and read-only; return their sha256."""
        digest = fs.sha256(data)
        if self.store.object(digest) is None:
            self._put(self.store.object_path(digest), data, step)
        return digest

    def save_drift(self, data: bytes, step: fs.StepHook) -> Path:
        """Keep bytes that somebody else wrote and that are about to be replaced; return where."""
        path = self.store.drift / fs.sha256(data)
        if fs.read(path) != data:
            self._put(path, data, step)
        return path

    def put_bundle(self, digest: str, document: dict[str, Any], step: fs.StepHook) -> None:
        """Keep an applied bundle."""
        if self.store.bundle(digest) is None:
            text = json.dumps(document, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            self._put(
                self.store.path / "bundles" / f"{digest}.json", text.encode("utf-8", "surrogatepass"), step
            )

    def keep(self, data: bytes, step: fs.StepHook) -> None:
        """Keep bytes for the time of one transaction, so that it can be undone after a crash."""
        digest = fs.sha256(data)
        if self.any_bytes(digest) is None:
            self._put(self.transaction / digest, data, step)

    def any_bytes(self, digest: str) -> bytes | None:
        """Return bytes by sha256 from wherever the store has them, or None."""
        for path in (self.store.object_path(digest), self.transaction / digest, self.store.drift / digest):
            data = fs.read(path)
            if data is not None and fs.sha256(data) == digest:
                return data
        return None

    def _put(self, path: Path, data: bytes, step: fs.StepHook) -> None:
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        # half-written files lie here, where the next run under this lock finds them
        fresh = self.folder / "object.new"
        fs.write_new(fresh, data, fs.Attributes(0o444), step)
        fresh.replace(path)
        fs.sync_folder(path.parent)
        if fs.read(path) != data:
            raise OSError(errno.EIO, "what was written reads back differently", str(path))
        step(f"stored {path.name[:12]}")

    def commit(self, state: dict[str, Any] | None, step: fs.StepHook) -> None:
        """Say what is applied from now on (None: nothing): the one moment at which a transaction is done."""
        if state is not None:
            fs.write_json(self.state_path, state, step)
            return
        self.state_path.unlink(missing_ok=True)
        fs.sync_folder(self.folder)
        step("state removed")

    def forget_journal(self, step: fs.StepHook) -> None:
        """End the transaction: after this there is nothing to finish or undo."""
        self.journal_path.unlink(missing_ok=True)
        fs.sync_folder(self.folder)
        step("journal removed")
        self.sweep()

    def sweep(self) -> None:
        """Remove what a killed run left half-written here. Only under the lock, without a journal."""
        shutil.rmtree(self.transaction, ignore_errors=True)
        for path in self.folder.glob("*.new"):
            path.unlink()

    @contextlib.contextmanager
    def lock(self, holder: dict[str, Any]) -> Iterator[None]:
        """Hold this installation; refuse at once when somebody else does, and say who."""
        self.store.ensure()
        try:
            self.folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise Refused(
                f"the store {self.store.path} cannot be written: {error.strerror}",
                "run as root, or give another --store",
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _busy(_holder_in(descriptor)) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode("ascii"), 0)
            try:
                yield
            finally:
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def refuse_if_busy(self) -> None:
        """Refuse when an operation that changes things is at work, without writing anything."""
        holder = self.holder()
        if holder is not None:
            raise _busy(holder)

    def holder(self) -> dict[str, Any] | None:
        """Return who holds the lock now, or None."""
        try:
            descriptor = os.open(self.folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return _holder_in(descriptor)
        finally:
            os.close(descriptor)


def _holder_in(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        value = json.loads(os.pread(descriptor, 4096, 0).decode("ascii"))
        if isinstance(value, dict):
            return value
    return {}


def _busy(holder: dict[str, Any]) -> Refused:
    who = "{} by {} since {} (pid {})".format(
        *(holder.get(key, "?") for key in ("operation", "actor", "since", "pid"))
    )
    return Refused(
        f"another operation is at work on this installation: {who}", "wait for it to end, then try again"
    )


def append_audit(path: Path, line: dict[str, Any]) -> None:
    """Append one line to the audit log and bring it to the disk. Raises OSError."""
    data = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode(
        "utf-8", "surrogatepass"
    )
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        # a line cut short by a power cut must not swallow this one
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(descriptor, data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_audit(path: Path, last: int | None) -> list[dict[str, Any]]:
    """Return the audit log, newest last; lines cut short by a crash are left out. Raises Refused."""
    try:
        data = fs.read(path) or b""
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}", "run as root") from error
    lines = []
    for text in data.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(text)
            if isinstance(value, dict):
                lines.append(value)
    return lines if last is None else lines[max(0, len(lines) - last) :]
