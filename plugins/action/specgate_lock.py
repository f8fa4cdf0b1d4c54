"""The fleet lock: one rollout at a time from this controller.

The file is never removed. Whoever wants the lock opens it, holds ``flock`` while it reads and writes (so that
two cannot both find it free), and leaves its own name in it. It counts as held while the process that took it
lives, at most until it expires, so a killed rollout leaves nothing to clean up.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase


def _open(path: str) -> int:
    """Open the lock file, making it for everyone's use when there is none; never through a link."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags)
    os.fchmod(handle, 0o666)
    return handle


def _alive(holder: dict[str, Any], now: float) -> bool:
    """Say whether the holder still counts. One on another machine is believed until the lock expires."""
    if now >= holder["expires"]:
        return False
    return holder["host"] != socket.gethostname() or Path(f"/proc/{holder['pid']}").exists()


def take(
    path: str, owner: str, run_id: str, hours: float, pid: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Take the lock for process ``pid``.

    Returns who holds it afterwards, and who stands in the way (None when it was taken).
    """
    handle = _open(path)
    with os.fdopen(handle, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        now = time.time()
        text = file.read()
        try:
            holder = json.loads(text) if text.strip() else None
        except ValueError:
            holder = None  # torn by a full disk: nobody can be holding it
        if holder and holder["run_id"] != run_id and _alive(holder, now):
            return holder, holder
        mine = {
            "owner": owner,
            "run_id": run_id,
            "host": socket.gethostname(),
            "pid": pid,
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)),
            "expires": now + hours * 3600,
        }
        file.seek(0)
        file.truncate()
        json.dump(mine, file)
        return mine, None


class ActionModule(ActionBase):
    """Take the lock on the controller, for the ansible-playbook process that this worker belongs to."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the task's result; raises AnsibleActionFail when someone else holds the lock."""
        super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            {
                "path": {"type": "path", "required": True},
                "owner": {"type": "str", "required": True},
                "run_id": {"type": "str", "required": True},
                "hours": {"type": "float", "default": 4.0},
            }
        )
        if self._task.check_mode:
            return {
                "changed": False,
                "skipped": True,
                "skip_reason": "check mode changes nothing, so it needs no lock",
            }
        path = args["path"]
        try:
            holder, other = take(path, args["owner"], args["run_id"], args["hours"], os.getppid())
        except OSError as e:
            raise AnsibleActionFail(
                f"{path}: cannot take the fleet lock: {e.strerror}. Set specgate_lock_path to a "
                "file that everyone who deploys may write."
            ) from e
        if other:
            raise AnsibleActionFail(
                f"{other['owner']} is changing this fleet since {other['since']} (run {other['run_id']}, "
                f"process {other['pid']} on {other['host']}). Wait for it to end; the lock {path} is then "
                "free by itself."
            )
        return {"changed": False, "holder": holder}
