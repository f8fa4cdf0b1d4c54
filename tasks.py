"""The operator's hands on the fleet: ``fab --list``.

Every task reads the inventory that Ansible reads, works on all chosen hosts at once and ends with one table.
Exit codes: 0 every host is well; 1 a host is not; 2 the request was wrong and no host was touched.
"""

from __future__ import annotations

import functools
import json as jsonlib
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fabric
from invoke import Collection, Exit, task

from controller import capability, remote, report, units
from controller import matrix as proofs
from controller.connect import HostError
from controller.fleet import INVENTORY, ROOT, FleetError, Host, inventory_path, load, tool
from controller.remote import Document, Session
from controller.render import PatchError, dump, render

CHOICE = {
    "hosts": "only these hosts: exact names with commas between them",
    "limit": "only what this pattern selects, as Ansible reads it: gpu1:gpu2, 'all:!gpu3', @file",
    "inventory": f"inventory file or folder (default {INVENTORY})",
}
JSON = {"json": "print the engine's documents as JSON"}
DRY_RUN = {"dry-run": "change nothing, show what would change"}
ACCEPT = {"accept-unknown-code": "patch code of unknown fingerprint; the audit log says so"}
PATCH = {"patch": "a folder of files/patches, a folder elsewhere, or a rendered bundle (.json)"}


def operation(**helps: str) -> Callable[[Callable[..., None]], Any]:
    """Make a task. What is wrong with the request ends it with exit code 2 before any host is touched."""

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def checked(c: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(c, fabric.Connection) or c.config.run.dry:
                raise Exit("fab: --hosts and --dry-run go after the task's name", 2)
            try:
                body(c, *args, **kwargs)
            except (FleetError, PatchError) as error:
                raise Exit(f"fab: {error}", 2) from error

        return task(auto_shortflags=False, help=dict(helps))(checked)

    return decorate


@operation(**CHOICE, **PATCH, **JSON)
def preflight(c, hosts=None, limit=None, inventory=INVENTORY, patch=None, json=False):
    """Look at every host: which SGLang, which state, does it fit."""
    fleet = load(inventory, hosts, limit)
    stores = {host.name: str(host.get("specgate_store")) for host in fleet}

    def look(here: Session, document: Document) -> None:
        document["free_mib"] = capability.free_mib(here, stores[here.host.name])
        document["gpus"] = capability.gpus(here)

    documents = by_engine("preflight", fleet, lambda host: ["inspect", *where(host)], bundle_for(patch), look)
    columns = [SGLANG, STATE, ("fits", report.variant), ("free", report.free), ("GPUs", report.gpus)]
    finish("preflight", documents, columns, json)


@operation(**CHOICE, **PATCH, **DRY_RUN, **JSON)
def backup(c, hosts=None, limit=None, inventory=INVENTORY, patch=None, dry_run=False, json=False):
    """Keep the pristine bytes of what the patch changes, and no more."""
    fleet = load(inventory, hosts, limit)
    command = audited("backup", dry_run)
    documents = by_engine("backup", fleet, lambda host: [*command, *where(host)], bundle_for(patch))
    finish("backup", documents, [SGLANG, STATE, OUTCOME, ("said", report.said)], json)


@operation(out="file to write; - for standard output", **PATCH)
def bundle(c, out="-", patch="speculative-disable-batch-threshold"):
    """Write the rendered bundle: the patch as the engine takes it."""
    data = rendered(patch)
    if out == "-":
        print(data.decode(), end="")
        return
    try:
        Path(out).write_bytes(data)
    except OSError as error:
        raise Exit(f"fab: {out} cannot be written: {error.strerror}", 2) from error
    said = jsonlib.loads(data)
    print(f"{out}: {said['name']} {said['version']}, {len(said['variants'])} variants")
    print(f"sha256 {said['sha256']}")


@operation(**CHOICE, **PATCH, **DRY_RUN, **JSON, **ACCEPT)
def patch(
    c, hosts=None, limit=None, inventory=INVENTORY, patch=None, dry_run=False, json=False,
    accept_unknown_code=False,
):  # fmt: skip
    """Back up, patch and prove now; restarts nothing."""
    fleet = load(inventory, hosts, limit)
    common = audited("apply", dry_run)

    def command(host: Host) -> list[str]:
        accept = accept_unknown_code or host.get("sglang_patch_accept_unknown_code")
        return [*common, *where(host), *gates(host), *(["--accept-unknown-code"] if accept else [])]

    def outdated(here: Session, document: Document) -> None:
        if document["exit_code"] == 0 and not dry_run:
            for unit in units.outdated(here, units.look(here), document):
                document["warnings"].append(
                    f"{unit} still serves the code from before: fab deploy restarts it"
                )

    documents = by_engine("patch", fleet, command, bundle_for(patch), outdated)
    if not json:
        report.diffs(documents)
    finish("patch", documents, [SGLANG, *GATES, ("changes", report.changed), OUTCOME], json)


@operation(**CHOICE, **JSON)
def verify(c, hosts=None, limit=None, inventory=INVENTORY, json=False):
    """Run the static gates on the live files and show what they saw."""
    fleet = load(inventory, hosts, limit)
    documents = by_engine("verify", fleet, lambda host: ["verify", *where(host), *gates(host)])
    finish("verify", documents, [SGLANG, *GATES, OUTCOME], json, evidence=True)


@operation(**CHOICE, **DRY_RUN, **{"extra-vars": "passed on to ansible-playbook: name=value or @file"})
def deploy(c, hosts=None, limit=None, inventory=INVENTORY, dry_run=False, extra_vars=None):
    """Roll out with Ansible: canary, batches, gates, rollback."""
    words = [tool("ansible-playbook"), "playbooks/deploy.yml", "-i", str(inventory_path(inventory))]
    if hosts is not None:
        limit = ",".join(host.name for host in load(inventory, hosts, limit))
    words += [f"--limit={limit}"] if limit else []
    words += ["--check", "--diff"] if dry_run else []
    words += [f"--extra-vars={extra_vars}"] if extra_vars else []
    os.chdir(ROOT)  # where ansible.cfg is
    sys.stdout.flush()
    os.execv(words[0], words)  # its exit code and its signals are its own


@operation(**CHOICE, **JSON, last="how many operations of each host (default 20)")
def history(c, hosts=None, limit=None, inventory=INVENTORY, last="20", json=False):
    """Show the hosts' audit logs as one, in the order of time."""
    fleet = load(inventory, hosts, limit)
    command = ["history", "--last", str(number("--last", last))]
    documents = by_engine("history", fleet, lambda host: [*command, *store(host)])
    if not json:
        report.history(documents)
    finish("history", documents, [OUTCOME, ("said", report.said)], json)


@operation(**CHOICE, **JSON, gates="health (default), configuration, behaviour: with commas between")
def health(c, hosts=None, limit=None, inventory=INVENTORY, gates="health", json=False):
    """Ask each running server for a real generation, on its own host."""
    fleet = load(inventory, hosts, limit)
    names = [name for name in gates.split(",") if name]
    if not names or set(names) - {"health", "configuration", "behaviour"}:
        raise FleetError(f"--gates {gates}: choose from health, configuration, behaviour")
    requests = {
        host.name: {name: ["probe", *names, *words] for name, words in servers(host).items()}
        for host in fleet
    }
    if not any(requests.values()):
        raise FleetError(f"{inventory} names no server: set sglang_server_instances")

    def work(here: Session) -> dict[str, Document]:
        host = here.host.name
        return {f"{host} {name}": remote.engine(here, words) for name, words in requests[host].items()}

    documents = on_each("health", fleet, work)
    finish("health", documents, [*map(report.gate, names), OUTCOME], json)


@operation(**CHOICE, **JSON)
def status(c, hosts=None, limit=None, inventory=INVENTORY, json=False):
    """Show the fleet in one screen: SGLang, patch, since when, servers."""
    fleet = load(inventory, hosts, limit)
    requests = {host.name: ["status", *where(host)] for host in fleet}

    def work(here: Session) -> dict[str, Document]:
        document = remote.engine(here, requests[here.host.name])
        found = units.look(here)
        document["units"] = {unit.name: unit.state for unit in found}
        document["outdated"] = units.outdated(here, found, document)
        return {here.host.name: report.judged(document)}

    finish("status", on_each("status", fleet, work), STATUS, json)


@operation(**CHOICE, **JSON, unit="only this server, by name", lines="of each host (default 50)")
def logs(c, hosts=None, limit=None, inventory=INVENTORY, unit=None, lines="50", json=False):
    """Show the end of the servers' journals, without keys and tokens."""
    last = number("--lines", lines)
    fleet = load(inventory, hosts, limit)

    def work(here: Session) -> dict[str, Document]:
        there = [one.name for one in units.look(here) if unit in (None, units.short(one.name))]
        said = units.journal(here, there, last) if there else []
        what = f"{len(said)} lines of {', '.join(map(units.short, there)) or 'no server'}"
        return {here.host.name: report.document("logs", here.host, what, lines=said)}

    documents = on_each("logs", fleet, work)
    if not json:
        report.lines(documents)
    finish("logs", documents, [OUTCOME, ("said", report.said)], json)


@operation(**CHOICE, **DRY_RUN, **JSON)
def rollback(c, hosts=None, limit=None, inventory=INVENTORY, dry_run=False, json=False):
    """Restore the pristine files, prove it, restart what ran."""
    fleet = load(inventory, hosts, limit)
    command = audited("rollback", dry_run)
    requests = {host.name: [*command, *where(host)] for host in fleet}

    def work(here: Session) -> dict[str, Document]:
        document = remote.engine(here, requests[here.host.name])
        if document["exit_code"] != 0:
            return {here.host.name: document}
        running = [unit for unit in units.look(here) if unit.state in units.RUNNING]
        if dry_run and document["changed"]:
            document["restarted"] = [unit.name for unit in running]
            return {here.host.name: document}
        old = units.outdated(here, running, document)
        dead = {} if dry_run else units.restart(here, old)
        document["restarted"] = [unit for unit in old if unit not in dead]
        for unit, journal in dead.items():
            report.fail(document, f"the files are pristine, but {unit} does not serve", journal)
        return {here.host.name: document}

    documents = on_each("rollback", fleet, work)
    if not json and dry_run:
        report.diffs(documents)
    columns = [SGLANG, STATE, ("changes", report.changed), ("restarts", report.restarted), OUTCOME]
    finish("rollback", documents, columns, json)


@operation(**PATCH)
def matrix(c, patch="speculative-disable-batch-threshold"):
    """Show what test runs have proven for each SGLang version."""
    report.matrix(proofs.rows(jsonlib.loads(rendered(patch))))


SGLANG: report.Column = ("SGLang", report.sglang)
STATE: report.Column = ("state", report.state)
OUTCOME: report.Column = ("", report.outcome)
STATUS: list[report.Column] = [
    SGLANG,
    STATE,
    ("patch", report.version),
    ("since", report.since),
    ("servers", report.servers),
]
GATES = [report.gate(name) for name in ("source", "compile", "import", "flag")]


def by_engine(
    name: str,
    fleet: Sequence[Host],
    command: Callable[[Host], list[str]],
    bundle: Callable[[Host], bytes | None] = lambda host: None,
    then: Callable[[Session, Document], None] = lambda here, document: None,
) -> dict[str, Document]:
    """Run one engine command on each host, and something after it. Raises FleetError, PatchError."""
    # all requests are right, or none is sent
    requests = {host.name: (command(host), bundle(host)) for host in fleet}

    def work(here: Session) -> dict[str, Document]:
        document = remote.engine(here, *requests[here.host.name])
        then(here, document)
        return {here.host.name: document}

    return on_each(name, fleet, work)


def on_each(
    name: str, fleet: Sequence[Host], work: Callable[[Session], dict[str, Document]]
) -> dict[str, Document]:
    """Do some work on each host over one connection; a host that fails stops no other.

    The work returns a document for each thing it looked at, by the name that the table shows.
    """

    def connected(host: Host) -> dict[str, Document]:
        with remote.session(host) as here:
            return work(here)

    def failed(host: Host, error: HostError) -> dict[str, Document]:
        return {host.name: report.no_answer(name, host, error)}

    with report.at_work(name, fleet) as ended:
        found = remote.each(fleet, connected, failed, ended)
    return {name: document for documents in found.values() for name, document in documents.items()}


def finish(
    name: str,
    documents: dict[str, Document],
    columns: Sequence[report.Column],
    json: bool,
    evidence: bool = False,
) -> None:
    """Print the results and end with exit code 1 when a host is not well."""
    if json:
        report.as_json(name, documents)
    else:
        report.evidence(documents, evidence)
        report.fleet(documents, columns)
    if any(document["exit_code"] for document in documents.values()):
        raise Exit(code=1)


def number(option: str, value: str) -> int:
    """Return an option's value as a positive number. Raises FleetError."""
    if not value.isdecimal() or int(value) == 0:
        raise FleetError(f"{option} {value!r}: give a positive number")
    return int(value)


def store(host: Host) -> list[str]:
    """Return the engine's option for the store."""
    return ["--store", str(host.get("specgate_store"))]


def where(host: Host) -> list[str]:
    """Return the engine's options for where SGLang is and what it keeps there, from the roles' variables."""
    words = store(host)
    for option, name in (("--root", "specgate_root"), ("--python", "specgate_python")):
        if value := host.get(name):
            words += [option, str(value)]
    for name, value in (host.get("specgate_environment") or {}).items():
        words += ["--env", f"{name}={value}"]
    return words


def gates(host: Host) -> list[str]:
    """Return the engine's options for the static gates."""
    words = ["--import-timeout", str(host.get("specgate_import_timeout"))]
    return [*words, "--no-import"] if host.get("specgate_no_import") else words


def servers(host: Host) -> dict[str, list[str]]:
    """Return the host's servers by name, each with the engine's options that reach it."""
    found = {}
    keys = host.variables.get("sglang_server_api_keys") or {}
    for server in host.get("sglang_server_instances") or []:
        if server.get("state", "present") != "present":
            continue
        name, address = server["name"], server.get("host", "127.0.0.1")
        reach = "127.0.0.1" if address in ("0.0.0.0", "::") else address
        url = f"http://{f'[{reach}]' if ':' in reach else reach}:{server['port']}"
        found[name] = ["--url", url, "--unit", f"sglang@{name}.service"]
        if name in keys:
            found[name] += ["--api-key-file", f"/etc/sglang/{name}.key"]
        if "speculative_disable_batch_threshold" in server:
            found[name] += ["--threshold", str(server["speculative_disable_batch_threshold"])]
    return found


def audited(command: str, dry_run: bool) -> list[str]:
    """Return an engine command that changes something, with who runs it and in which run."""
    words = [command, "--actor", remote.actor(), "--run-id", secrets.token_hex(6)]
    return [*words, "--check"] if dry_run else words


@functools.cache
def rendered(patch: str) -> bytes:
    """Return the bundle of a patch. Raises PatchError."""
    try:
        if patch.endswith(".json"):
            return Path(patch).expanduser().read_bytes()
        folder = Path(patch).expanduser() if "/" in patch else ROOT / "files" / "patches" / patch
        return dump(render(folder)).encode()
    except OSError as error:
        raise PatchError(f"patch {patch} cannot be read: {error}") from error


def bundle_for(patch: str | None) -> Callable[[Host], bytes]:
    """Return what gives a host its bundle: that of ``patch``, else of the patch that its inventory names."""
    return lambda host: rendered(patch or str(host.get("specgate_patch")))


ns = Collection(
    preflight, backup, bundle, patch, verify, deploy, health, status, logs, rollback, history, matrix
)
