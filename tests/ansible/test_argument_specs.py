"""Defaults and argument_specs of every role say the same, and every README names every variable."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = sorted(path for path in (Path(__file__).resolve().parents[2] / "roles").iterdir() if path.is_dir())


def read(role: Path, name: str) -> Any:
    """Return a YAML file of a role."""
    return yaml.safe_load((role / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_defaults_equal_argument_specs(role: Path) -> None:
    defaults = read(role, "defaults/main.yml") or {}
    options = read(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"] or {}
    assert {name: option.get("default") for name, option in options.items()} == defaults


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_public_variables_carry_the_name_of_the_role(role: Path) -> None:
    wrong = [name for name in read(role, "defaults/main.yml") or {} if not name.startswith(f"{role.name}_")]
    assert wrong == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_the_readme_names_every_variable(role: Path) -> None:
    text = (role / "README.md").read_text(encoding="utf-8")
    assert [name for name in read(role, "defaults/main.yml") or {} if f"`{name}`" not in text] == []
    assert len(text.splitlines()) <= 60
