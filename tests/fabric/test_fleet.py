"""The fleet as Fabric sees it is the fleet as Ansible sees it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from controller.fleet import ROOT, FleetError, load, tool

INVENTORY = """\
gpu:
  children:
    a:
      hosts:
        gpu1: {ansible_host: 198.51.100.11, ansible_port: 2201}
        gpu2: {ansible_host: "{{ network }}.12", ansible_become: false}
    b:
      hosts:
        gpu3: {ansible_connection: local, specgate_environment: {HOME: "/home/{{ inventory_hostname }}"}}
  vars:
    network: 198.51.100
    ansible_user: deploy
    ansible_ssh_private_key_file: "{{ inventory_dir }}/a key"
    ansible_ssh_common_args: -o 'UserKnownHostsFile="{{ inventory_dir }}/known hosts"'
    where: "/opt/{{ inventory_hostname }}"
    specgate_python: "{{ where }}/bin/python"
    specgate_no_import: "{{ 1 == 1 }}"
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    folder = tmp_path / "a fleet"
    folder.mkdir()
    (folder / "hosts.yml").write_text(INVENTORY)
    return folder


def ansible_says(inventory: Path, host: str, variable: str) -> object:
    """Ask Ansible itself what a variable is."""
    done = subprocess.run(
        [tool("ansible"), host, "-i", inventory, "-c", "local", "-m", "debug", "-a", f"var={variable}"],
        env={**os.environ, "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    return json.loads(done.stdout.partition("=> ")[2])[variable]


@pytest.mark.parametrize(
    "variable",
    [
        "ansible_host",
        "ansible_ssh_common_args",
        "ansible_ssh_private_key_file",
        "specgate_python",
        "specgate_no_import",
    ],
)
def test_templates_are_filled_in_as_ansible_does(inventory: Path, variable: str) -> None:
    (host,) = load(str(inventory), hosts="gpu2")
    assert host.get(variable) == ansible_says(inventory, "gpu2", variable)


def test_templates_inside_a_dictionary(inventory: Path) -> None:
    (host,) = load(str(inventory), hosts="gpu3")
    assert host.get("specgate_environment") == {"HOME": "/home/gpu3"}


def test_ssh_gets_the_options_that_ansible_would_give(inventory: Path) -> None:
    (host,) = load(str(inventory), hosts="gpu1")
    done = subprocess.run(
        ["ssh", "-G", *host.ssh_options, "--", host.address], capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    for line in (
        "user deploy",
        "port 2201",
        "hostname 198.51.100.11",
        f"identityfile {inventory}/a key",
        f"userknownhostsfile {inventory}/known hosts",
    ):
        assert line in said


def test_become_and_connection(inventory: Path) -> None:
    one, two, three = load(str(inventory))
    assert (one.become, two.become, three.local) == ("root", None, True)


@pytest.mark.parametrize("limit", ["gpu1:gpu3", "a", "all:!gpu1", "gpu[1:2]", "a:&gpu2", "~gpu[13]"])
def test_limit_is_ansibles(inventory: Path, limit: str) -> None:
    done = subprocess.run(
        [tool("ansible"), "all", "-i", inventory, f"--limit={limit}", "--list-hosts"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert [host.name for host in load(str(inventory), limit=limit)] == done.stdout.split()[2:]


def test_limit_from_a_file(inventory: Path, tmp_path: Path) -> None:
    (tmp_path / "failed").write_text("gpu2\ngpu3\n")
    assert [host.name for host in load(str(inventory), limit=f"@{tmp_path}/failed")] == ["gpu2", "gpu3"]


def test_hosts_and_limit_together(inventory: Path) -> None:
    assert [host.name for host in load(str(inventory), hosts="gpu2,gpu1", limit="a")] == ["gpu1", "gpu2"]


@pytest.mark.parametrize(
    ("hosts", "limit", "said"),
    [
        ("gpu9", None, "'gpu9' not in"),
        ("gpu1,gpu*", None, "'gpu*' not in"),
        ("$(reboot)", None, "'$(reboot)' not in"),
        ("gpu1;reboot", None, "'gpu1;reboot' not in"),
        ("gpu3", "a", "'gpu3' not in"),
        (None, "gpu1:gpu9", "gpu9"),
        (None, "nothing", "nothing"),
        (None, "--help", "--help"),
        (",", None, "no host"),
    ],
)
def test_a_wrong_choice_is_refused(inventory: Path, hosts: str | None, limit: str | None, said: str) -> None:
    with pytest.raises(FleetError) as refused:
        load(str(inventory), hosts=hosts, limit=limit)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('ansible_ssh_common_args: "-o \'Port=2"', "cannot be split"),
        ("ansible_become_method: doas", "only sudo"),
        ("ansible_host: \"{{ lookup('env', 'X') }}\"", "without Ansible"),
        ("ansible_host: '{{ nowhere }}'", "nowhere"),
        ("ansible_host: '{{ ansible_host }}'", "refers to itself"),
    ],
)
def test_a_wrong_inventory_is_refused(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text(f"gpu:\n  hosts:\n    gpu1:\n  vars:\n    {line}\n")
    with pytest.raises(FleetError) as refused:
        load(str(file))
    assert said in str(refused.value)
    assert "gpu1" in str(refused.value)


def test_a_broken_inventory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("gpu: [\n")
    with pytest.raises(FleetError, match="cannot be read"):
        load(str(file))
    with pytest.raises(FleetError, match="does not exist"):
        load(str(tmp_path / "nowhere"))


def test_roles_defaults_hold_where_the_inventory_says_nothing(inventory: Path) -> None:
    (host,) = load(str(inventory), hosts="gpu1")
    assert host.get("specgate_store") == "/var/lib/specgate"
    assert host.get("specgate_python") == "/opt/gpu1/bin/python"
