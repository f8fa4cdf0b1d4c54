"""Opens an SSH connection as ``ssh`` itself would, and only to a host whose key is known."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import fabric
import paramiko

from .fleet import ROOT, Host

CONNECT_TIMEOUT = 10  # seconds for TCP, for the banner, for the login and for a channel, each
LOST_AFTER = 20  # seconds without an acknowledgement until a connection counts as cut
KEEPALIVE = 5  # seconds; a keepalive is what goes unacknowledged on a connection that waits


class HostError(Exception):
    """A host that cannot be worked on: what was wrong in one line, and what to do."""

    def __init__(self, summary: str, remedy: str, outcome: str = "unreachable") -> None:
        super().__init__(summary)
        self.summary = summary
        self.remedy = remedy
        self.outcome = outcome


def connect(host: Host) -> fabric.Connection:
    """Open a connection with the options that Ansible would give to ssh. Raises HostError."""
    said = _ssh_settings(host)
    known = _known_hosts(said)
    if host.key and not os.access(_path(host.key), os.R_OK):
        raise HostError(f"private key {host.key} cannot be read", "correct ansible_ssh_private_key_file")
    keys = [_path(key) for key in said["identityfile"].split("\n")]
    connection = fabric.Connection(
        said["hostname"],
        user=said["user"],
        port=int(said["port"]),
        gateway=_gateway(said, host.ssh_options),
        config=fabric.Config(overrides={"load_ssh_configs": False}),  # ssh -G has read them
        connect_timeout=CONNECT_TIMEOUT,
        connect_kwargs={
            "key_filename": [str(key) for key in keys if key.exists()],
            "look_for_keys": False,
            "allow_agent": said.get("identitiesonly") != "yes",
            "banner_timeout": CONNECT_TIMEOUT,
            "auth_timeout": CONNECT_TIMEOUT,
            "channel_timeout": CONNECT_TIMEOUT,
        },
    )
    # Fabric accepts any key unless it is told otherwise before it opens.
    for file in known:
        with contextlib.suppress(OSError):
            connection.client.load_system_host_keys(file)
    connection.client.set_missing_host_key_policy(_Refuse(known))
    try:
        connection.open()
    except HostError:
        raise
    except (paramiko.SSHException, OSError, EOFError) as error:
        connection.client.close()
        raise _explain(error, host, connection, known) from error
    _notice_cuts(connection.transport)
    return connection


def reason(error: BaseException) -> str:
    """Return an exception's text, or its name when it has none."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class _Refuse(paramiko.MissingHostKeyPolicy):
    """Refuses an unknown host key and says which it was."""

    def __init__(self, known: list[str]) -> None:
        self.known = known

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Refuse. Raises HostError."""
        client.close()
        name, _, port = hostname.lstrip("[").partition("]:")
        scan = f"ssh-keyscan {f'-p {port} ' if port else ''}{name} >> {shlex.quote(self.known[0])}"
        raise HostError(
            f"host key is unknown: {key.get_name()} {key.fingerprint}",
            f"compare it with what the host's console says; if it is right: {scan}",
        )


def _ssh_settings(host: Host) -> dict[str, str]:
    """Ask ``ssh -G`` what ssh would do, ssh_config included; a repeated option is joined by newlines."""
    if host.address.startswith("-"):
        raise HostError(f"address {host.address!r} is not a host name", "correct ansible_host")
    command = ["ssh", "-G", *host.ssh_options, "--", host.address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=ROOT)
    except FileNotFoundError:
        raise HostError("the ssh command is missing on this machine", "install openssh-client") from None
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines()[-1:] or ["ssh -G failed"]
        raise HostError(f"ssh options not understood: {complaint[0]}", "correct ansible_ssh_common_args")
    said: dict[str, str] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        said[name] = f"{said[name]}\n{value}" if name in said else value
    return said


def _known_hosts(said: dict[str, str]) -> list[str]:
    """Return the known_hosts files; ssh -G prints them with spaces between and without quotes."""
    files: list[Path] = []
    for name in ("userknownhostsfile", "globalknownhostsfile"):
        value = said.get(name, "")
        whole = _path(value)
        files += [whole] if whole.is_file() else [_path(each) for each in value.split()]
    return [str(file) for file in files] or ["/etc/ssh/ssh_known_hosts"]


def _path(name: str) -> Path:
    """Return a file that ssh names; relative ones begin at the checkout, where playbooks run too."""
    return ROOT / Path(name).expanduser()


def _gateway(said: dict[str, str], options: Sequence[str]) -> str | None:
    """Return the command that reaches a host behind another; ssh checks that one's key itself.

    As with ssh's own ProxyJump, of the options only the configuration file holds for the jump host too.
    """
    command = said.get("proxycommand")
    if jump := said.get("proxyjump"):
        before, _, last = jump.rpartition(",")
        alive = f"-o ServerAliveInterval={KEEPALIVE} -o ServerAliveCountMax={LOST_AFTER // KEEPALIVE}"
        via = f"-J {shlex.quote(before)} " if before else ""
        target = shlex.quote(f"[{said['hostname']}]:{said['port']}")
        last = last if last.startswith("ssh://") else f"ssh://{last}"
        config = f"-F {shlex.quote(options[options.index('-F') + 1])} " if "-F" in options[:-1] else ""
        command = f"ssh {config}-o BatchMode=yes {alive} {via}-W {target} -- {shlex.quote(last)}"
    return None if command in (None, "none") else command


def _notice_cuts(transport: paramiko.Transport) -> None:
    """Let the kernel end a connection that is no longer acknowledged.

    paramiko sends keepalives but never looks for their answers (paramiko#2463), so that without this a cut
    connection hangs until TCP gives up, a quarter of an hour later.
    """
    transport.set_keepalive(KEEPALIVE)
    if isinstance(transport.sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER * 1000)


def _explain(error: Exception, host: Host, connection: fabric.Connection, known: list[str]) -> HostError:
    """Turn what went wrong while connecting into one line and what to do."""
    where = f"{connection.host} port {connection.port}"
    if isinstance(error, paramiko.BadHostKeyException):
        return HostError(
            f"host key has CHANGED: it is now {error.key.get_name()} {error.key.fingerprint}",
            "someone may be in between; if the host was installed anew: ssh-keygen -R "
            f"{shlex.quote(error.hostname)} -f {shlex.quote(known[0])}, then add the new key",
        )
    if isinstance(error, paramiko.AuthenticationException) or "No authentication methods" in str(error):
        return HostError(
            f"login as {connection.user} was refused by {where}",
            "check ansible_user and ansible_ssh_private_key_file, or load the key into ssh-agent",
        )
    if isinstance(error, socket.gaierror):
        return HostError(f"no address for {connection.host}", "correct ansible_host in the inventory")
    why = reason(error)
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        why = reason(next(iter(error.errors.values())))
    elif isinstance(error, TimeoutError):
        why = f"no answer within {CONNECT_TIMEOUT} s"
    return HostError(
        f"cannot connect to {where}: {why}", f"is it up? To go on without it: --limit 'all:!{host.name}'"
    )
