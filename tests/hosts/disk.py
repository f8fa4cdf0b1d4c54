"""The disk of a test host: the upper layer of an overlay over this machine's root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

OPERATING_SYSTEM = {
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "media", "proc", "run", "sbin", "sys", "usr", "var",
}  # fmt: skip
EMPTY = {
    "root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777, "var/log": 0o755, "var/lib/specgate": 0o700, "etc/ssh": 0o755,
    "usr/local": 0o755, "usr/local/bin": 0o755, "usr/local/lib": 0o755, "usr/local/sbin": 0o755,
    "etc/systemd/system/multi-user.target.wants": 0o755, "etc/systemd/system/timers.target.wants": 0o755,
    "etc/systemd/system/sysinit.target.wants": 0o755, "etc/systemd/system/getty.target.wants": 0o755,
}  # fmt: skip
MASKED = (
    "systemd-udevd.service", "systemd-udev-trigger.service", "systemd-timesyncd.service", "console-getty.service",
    "getty@tty1.service", "e2scrub_reap.service", "systemd-networkd-wait-online.service",
)  # fmt: skip
# Without the post-quantum key exchange, which takes half the processor time of a short connection.
SSHD = """\
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org
PermitRootLogin no
PasswordAuthentication no
AllowUsers deploy
UsePAM yes
UseDNS no
MaxStartups 100
Subsystem sftp /usr/lib/openssh/sftp-server
"""
USER, UID = "deploy", 1500


def prepare(up: Path, name: str, public_key: str) -> str:
    """Write the upper layer ``up`` of host ``name`` and return the host's public key (type and base64).

    The machine's own users' files, logs and enabled units are hidden; ``deploy`` logs in with ``public_key`` and
    has sudo.
    """
    for entry in sorted(Path("/").iterdir()):
        if entry.name in OPERATING_SYSTEM | {"root", "tmp"}:
            continue
        if entry.is_dir():
            _empty(up / entry.name, 0o755)
        else:
            os.mknod(up / entry.name, 0o020000, os.makedev(0, 0))  # overlayfs: whiteout
    for path, mode in EMPTY.items():
        _empty(up / path, mode)
    for path in ("opt/sglang", "opt/models", "var/log/journal"):
        (up / path).mkdir(parents=True, exist_ok=True)
    if os.path.lexists("/usr/sbin/policy-rc.d"):
        (up / "usr/sbin").mkdir(parents=True)
        os.mknod(up / "usr/sbin/policy-rc.d", 0o020000, os.makedev(0, 0))
    _write(up / "etc/machine-id", "")
    _write(up / "etc/hostname", f"{name}\n")
    _write(up / "etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    _write(up / "etc/ssh/sshd_config", SSHD)
    _user(up, public_key)
    wants = up / "etc/systemd/system/multi-user.target.wants"
    (wants / "ssh.service").symlink_to("/lib/systemd/system/ssh.service")
    for unit in MASKED:
        (up / "etc/systemd/system" / unit).symlink_to("/dev/null")
    key = up / "etc/ssh/ssh_host_ed25519_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)], check=True)
    return " ".join(key.with_suffix(".pub").read_text().split()[:2])


def _user(up: Path, public_key: str) -> None:
    """Give the host its ordinary user, who becomes root through sudo only."""
    lines = {
        "passwd": f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/bash\n",
        "group": f"{USER}:x:{UID}:\n",
        "shadow": f"{USER}:*:19000:0:99999:7:::\n",
    }
    for file, line in lines.items():
        _write(up / "etc" / file, Path("/etc", file).read_text() + line, 0o640 if file == "shadow" else 0o644)
    _write(up / "etc/sudoers.d/deploy", f"{USER} ALL=(root) NOPASSWD: ALL\n", 0o440)
    home = up / "home" / USER
    keys = home / ".ssh/authorized_keys"
    _write(keys, public_key, 0o600)
    keys.parent.chmod(0o700)
    for path in (home, keys.parent, keys):
        os.chown(path, UID, UID)


def _empty(path: Path, mode: int) -> None:
    """An empty directory in place of the machine's own."""
    path.mkdir(parents=True, exist_ok=True)
    os.setxattr(path, "trusted.overlay.opaque", b"y")
    path.chmod(mode)


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
