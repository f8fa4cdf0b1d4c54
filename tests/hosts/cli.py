"""The command line of the test hosts: `tests/hosts/testhost VERB …`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.hosts import models, sglang_env
from tests.hosts.machine import Fleet, Host, HostError


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    top = argparse.ArgumentParser(
        prog="testhost", description="Hosts with a real systemd and sshd on this machine."
    )
    verbs = top.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="create and start hosts and wait for them; those that run stay")
    up.add_argument("names", nargs="+", metavar="NAME")
    up.add_argument(
        "--sglang",
        default="0.5.9",
        metavar="VERSION",
        help="SGLang at /opt/sglang, or none (default %(default)s)",
    )
    up.add_argument("--store-size", default="", metavar="SIZE", help="limit /var/lib/specgate, such as 2m")
    up.add_argument("--memory", default="", metavar="SIZE", help="limit the host's memory, such as 4g")
    up.add_argument("--pids", default="", metavar="N", help="limit the host's processes and threads")
    for verb, text in {
        "start": "power on again",
        "kill": "pull the plug; the disk stays",
        "cut": "partition from the network",
        "heal": "end the partition",
        "wait": "wait until systemd runs",
    }.items():
        verbs.add_parser(verb, help=text).add_argument("names", nargs="+", metavar="NAME")
    latency = verbs.add_parser("latency", help="add round-trip time")
    latency.add_argument("names", nargs="+", metavar="NAME")
    latency.add_argument("--ms", type=float, required=True, help="milliseconds; 0 takes it away")
    ssh = verbs.add_parser("ssh", help="run a command as the user deploy")
    ssh.add_argument("name", metavar="NAME")
    ssh.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    down = verbs.add_parser("down", help="remove hosts and their disks; with the last one the network")
    down.add_argument("names", nargs="*", metavar="NAME")
    down.add_argument("--all", action="store_true", help="every host of this slot")
    verbs.add_parser("list", help="name, address and power of every host")
    verbs.add_parser("keys", help="where the user's key and the hosts' keys are")
    verbs.add_parser("check", help="print what is left of this slot; exit 1 when anything is")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code (1: the host said no, 2: wrong use)."""
    options = parser().parse_args(arguments)
    fleet = Fleet.here()
    try:
        return _do(fleet, options)
    except HostError as error:
        print(f"testhost: {error}", file=sys.stderr)
        return 1


def _do(fleet: Fleet, options: argparse.Namespace) -> int:
    if options.verb == "up":
        limits = (options.store_size, options.memory, options.pids)
        bring_up(fleet, options.names, options.sglang, *limits)
    elif options.verb == "down":
        take_down(fleet, options.names, options.all)
    elif options.verb == "list":
        for host in fleet.hosts:
            print(f"{host.name}\t{host.address}\t{'on' if host.runs else 'off'}")
    elif options.verb == "keys":
        print(f"user deploy\t{fleet.key}\nhosts\t{fleet.known_hosts}")
    elif options.verb == "check":
        left = fleet.leftovers()
        print("\n".join(left), end="\n" if left else "")
        return 1 if left else 0
    elif options.verb == "ssh":
        return subprocess.run(_known(fleet, [options.name])[0].ssh(*options.command)).returncode
    else:
        for host in _known(fleet, options.names):
            if options.verb == "latency":
                host.latency(options.ms)
            else:
                getattr(host, options.verb)()
    return 0


def bring_up(
    fleet: Fleet,
    names: list[str],
    sglang: str = "0.5.9",
    store_size: str = "",
    memory: str = "",
    pids: str = "",
) -> list[Host]:
    """Create what does not exist, start what does not run, wait for both; hosts that run stay."""
    fleet.check_machine()
    environment = weights = None
    if sglang != "none":
        environment = sglang_env.build(sglang)
        weights = models.build(environment)
    with fleet.locked():
        fleet.network_up()
        hosts = [Host(fleet, name) for name in names]
        off = [host for host in hosts if not host.runs]
        for host in off:
            if host not in fleet.hosts:
                host.create(environment, weights, store_size, memory, pids)
            host.start()
    for host in hosts:
        host.wait(degraded=host not in off)  # what tests did to a host that stands is theirs
    return hosts


def take_down(fleet: Fleet, names: list[str], everything: bool = False) -> None:
    """Remove the named hosts, or all; the network goes with the last one."""
    with fleet.locked():
        for host in fleet.hosts if everything else _known(fleet, names):
            host.remove()
        if not fleet.hosts:
            fleet.network_down()


def _known(fleet: Fleet, names: list[str]) -> list[Host]:
    hosts = {host.name: host for host in fleet.hosts}
    if missing := [name for name in names if name not in hosts]:
        raise HostError(f"no host {', '.join(missing)} in slot {fleet.slot}; `testhost list` shows the hosts")
    return [hosts[name] for name in names]
