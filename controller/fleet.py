"""Reads the fleet from the same inventory as Ansible, through ``ansible-inventory``."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import yaml
from jinja2.sandbox import SandboxedEnvironment

ROOT = Path(__file__).resolve().parent.parent
INVENTORY = "inventory/gpu"
DEFAULTS = ("specgate", "sglang_server")  # roles whose variables mean the same here
TRUE = {"1", "true", "yes", "on", "y", "t"}  # what Ansible takes for true, in lower case


class FleetError(Exception):
    """The inventory or the choice of hosts is wrong; the text says where and what to do."""


@dataclass(frozen=True)
class Host:
    """A host of the inventory. ``ssh_options`` is how ``ssh`` would be called, without the destination."""

    name: str
    address: str
    local: bool = False
    ssh_options: tuple[str, ...] = ()
    key: str | None = None
    become: str | None = "root"
    python: str = "/usr/bin/python3"
    variables: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an inventory variable with its templates filled in. Raises FleetError."""
        value = self.variables.get(name)
        return default if value is None else _fill(value, self.variables, self.name, name)


def tool(name: str) -> str:
    """Return the path of a command from the environment that runs this. Raises FleetError."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FleetError(f"{name} not found: run `make setup`, then use .venv/bin/fab")
    return found


def inventory_path(inventory: str) -> Path:
    """Return the inventory as an absolute path: below the working folder, else below the project's root."""
    for path in (Path(inventory), ROOT / inventory):
        if path.exists():
            return path.resolve()
    raise FleetError(f"inventory {inventory} does not exist: give --inventory a file or a folder")


def load(inventory: str = INVENTORY, hosts: str | None = None, limit: str | None = None) -> list[Host]:
    """Return the chosen hosts, in the inventory's order.

    ``hosts`` is a list of exact names with commas between them; ``limit`` is a pattern as Ansible reads it.
    With both, a host must be in both. Raises FleetError when nothing is left or a name is unknown.
    """
    path = inventory_path(inventory)
    command = [tool("ansible-inventory"), "-i", str(path), "--list"]
    if limit:
        command.append(f"--limit={limit}")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)
    complaint = " ".join(done.stderr.split())
    if done.returncode != 0 or "Unable to parse" in done.stderr:
        raise FleetError(f"inventory {inventory} cannot be read: {complaint[-400:]}")
    if "Could not match supplied host pattern" in done.stderr:
        # Ansible goes on without the part that matches nothing; a mistyped host would silently stay as it is.
        raise FleetError(f"--limit {limit!r}: {complaint.split('WARNING]: ')[-1]}")
    said = json.loads(done.stdout)
    variables: dict[str, dict[str, Any]] = said["_meta"]["hostvars"]
    names = [name for name in _in_order(said, "all", set()) if name != "localhost" or name in variables]
    if hosts is not None:
        wanted = [name for name in hosts.split(",") if name]
        unknown = [name for name in wanted if name not in names]
        if unknown:
            known = ", ".join(names) or "none"
            raise FleetError(f"--hosts: {', '.join(map(repr, unknown))} not in {inventory}; known: {known}")
        names = [name for name in names if name in wanted]
    if not names:
        raise FleetError(f"no host of {inventory} is left by --limit {limit!r}, --hosts {hosts!r}")
    common = {**_defaults(), "inventory_dir": str(path if path.is_dir() else path.parent)}
    return [_host(name, {**common, **variables.get(name, {})}) for name in names]


def _defaults() -> dict[str, Any]:
    """Return the roles' defaults, so that both fronts assume the same where an inventory says nothing."""
    found: dict[str, Any] = {}
    for role in DEFAULTS:
        file = ROOT / "roles" / role / "defaults" / "main.yml"
        if file.exists():
            found.update(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    return found


def _in_order(groups: Mapping[str, Any], group: str, seen: set[str]) -> list[str]:
    """Return the hosts below a group, each once, as the inventory lists them."""
    found = []
    for child in groups.get(group, {}).get("children", []):
        found += _in_order(groups, child, seen)
    for name in groups.get(group, {}).get("hosts", []):
        if name not in seen:
            seen.add(name)
            found.append(name)
    return found


def _host(name: str, variables: dict[str, Any]) -> Host:
    """Make a Host of what the inventory says; variables become ssh options as in Ansible's ssh plugin."""
    variables = {**variables, "inventory_hostname": name, "inventory_hostname_short": name.split(".")[0]}

    def get(*names: str) -> Any:
        values = (variables.get(each) for each in names)
        value = next((each for each in values if each is not None), None)
        return None if value is None else _fill(value, variables, name, names[0])

    options: list[str] = []
    for option, value in (
        ("Port", get("ansible_port", "ansible_ssh_port")),
        ("User", get("ansible_user", "ansible_ssh_user")),
        ("IdentityFile", key := get("ansible_ssh_private_key_file", "ansible_private_key_file")),
    ):
        if value is not None:
            options += ["-o", f'{option}="{value}"' if option == "IdentityFile" else f"{option}={value}"]
    for variable in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
        try:
            options += shlex.split(get(variable) or "")
        except ValueError as error:
            raise FleetError(f"{name}: {variable} cannot be split into words: {error}") from error
    method = get("ansible_become_method") or "sudo"
    if method != "sudo":
        raise FleetError(f"{name}: ansible_become_method {method} is not supported here, only sudo")
    become = get("ansible_become")
    wanted = True if become is None else str(become).lower() in TRUE
    python = str(get("ansible_python_interpreter") or "")
    return Host(
        name=name,
        address=str(get("ansible_host", "ansible_ssh_host") or name),
        local=get("ansible_connection") == "local",
        ssh_options=tuple(options),
        key=str(key) if key else None,
        become=str(get("ansible_become_user") or "root") if wanted else None,
        python=python if python.startswith("/") else "/usr/bin/python3",  # else it is auto, auto_silent …
        variables=variables,
    )


def _fill(value: Any, variables: Mapping[str, Any], host: str, name: str, depth: int = 0) -> Any:
    """Fill in the templates of a variable: ``ansible-inventory`` prints them as they are written.

    Plain Jinja2 over the host's own variables; what needs more of Ansible (lookups, its filters) is refused.
    """
    if isinstance(value, list):
        return [_fill(each, variables, host, name, depth) for each in value]
    if isinstance(value, dict):
        return {key: _fill(each, variables, host, name, depth) for key, each in value.items()}
    if not isinstance(value, str) or not ("{{" in value or "{%" in value):
        return value
    if depth == 20:
        raise FleetError(f"{host}: variable {name} refers to itself")
    environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        if value.startswith("{{") and value.endswith("}}") and value.count("{{") == 1:
            filled = environment.compile_expression(value[2:-2], undefined_to_none=False)(**variables)
            if isinstance(filled, jinja2.Undefined):
                raise jinja2.UndefinedError(f"{value[2:-2].strip()} is undefined")
        else:
            filled = environment.from_string(value).render(variables)
    except jinja2.TemplateError as error:
        raise FleetError(
            f"{host}: cannot fill in {name} = {value!r} without Ansible ({error}); write its value"
        ) from error
    return _fill(filled, variables, host, name, depth + 1)
