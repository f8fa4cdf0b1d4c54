"""File operations that survive a power cut, and say which step they are at."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

StepHook = Callable[[str], None]
# these sign or describe the old content; copied onto new content they would be wrong
_BOUND_TO_CONTENT = ("security.ima", "security.evm")


def sha256(data: bytes) -> str:
    """Return the hex digest of ``data``."""
    return hashlib.sha256(data).hexdigest()


def read(path: Path) -> bytes | None:
    """Return a file's bytes, or None when there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


@dataclass(frozen=True)
class Attributes:
    """What a replaced file must keep: mode, owner, and extended attributes such as the SELinux context."""

    mode: int = 0o644
    uid: int = -1
    gid: int = -1
    xattrs: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Attributes:
        """Read them from an existing file."""
        found = path.stat()
        xattrs: dict[str, bytes] = {}
        # a file system without extended attributes has none to keep
        with contextlib.suppress(OSError, AttributeError):
            xattrs = {
                name: os.getxattr(path, name) for name in os.listxattr(path) if name not in _BOUND_TO_CONTENT
            }
        return cls(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, xattrs)

    def put_on(self, descriptor: int) -> None:
        """Set them on an open file. Raises OSError when one cannot be kept."""
        current = os.fstat(descriptor)
        uid = current.st_uid if self.uid == -1 else self.uid
        gid = current.st_gid if self.gid == -1 else self.gid
        if (uid, gid) != (current.st_uid, current.st_gid):
            os.fchown(descriptor, uid, gid)
        os.fchmod(descriptor, self.mode)
        for name, value in self.xattrs.items():
            try:
                os.setxattr(descriptor, name, value)
            except OSError as error:
                if error.errno != errno.ENOTSUP and os.getxattr(descriptor, name) != value:
                    raise


def write_new(path: Path, data: bytes, attributes: Attributes, step: StepHook) -> None:
    """Write a file that nobody reads yet, and bring it to the disk. A half-written one is removed."""
    # in a folder of somebody else's, nothing that already has this name may be written through
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            step(f"opened {path.name}")
            half = len(data) // 2
            stream.write(data[:half])
            stream.flush()
            step(f"half written {path.name}")
            stream.write(data[half:])
            stream.flush()
            attributes.put_on(stream.fileno())
            os.fsync(stream.fileno())
        step(f"written {path.name}")
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_atomically(path: Path, data: bytes, step: StepHook, mode: int = 0o644) -> None:
    """Give ``path`` the content ``data``: a reader sees the old or the new, also after a power cut."""
    fresh = path.with_name(path.name + ".new")
    write_new(fresh, data, Attributes(mode), step)
    fresh.replace(path)
    sync_folder(path.parent)
    step(f"in place {path.name}")


def write_json(path: Path, value: Any, step: StepHook) -> None:
    """Replace ``path`` atomically by a JSON document that people can read."""
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    replace_atomically(path, text.encode("utf-8", "surrogatepass"), step)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``path``, or None without such a file. ValueError when it is damaged."""
    data = read(path)
    if data is None:
        return None
    value = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def put_time_right(path: Path) -> None:
    """Date a file now that claims to be from the future: it was written before the clock was put back.

    Whether a server runs older code than its files is told by their times.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_mtime > time.time():
            os.utime(path)


def free_bytes(path: Path) -> int:
    """Return how much this process may still write on the file system of ``path`` or its nearest parent."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
