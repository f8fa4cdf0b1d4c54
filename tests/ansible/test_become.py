"""Root is taken task by task, for what needs it: never for a play, a block, a role or a host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/tasks/*.yml")])
# what reads or changes SGLang, the store, the units, the users
NEED_ROOT = {
    *("specgate_info", "specgate_patch", "specgate_verify", "specgate_probe", "specgate_unit"),
    *(f"ansible.builtin.{name}" for name in ("copy", "file", "find", "group", "template", "user")),
}


def entries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every play, block, role and task below a YAML value."""
    for one in value if isinstance(value, list) else []:
        if isinstance(one, dict):
            yield one
            for part in one.values():
                yield from entries(part)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_tasks_that_need_root_take_it(file: Path) -> None:
    for entry in entries(yaml.safe_load(file.read_text(encoding="utf-8"))):
        takes = {name: value for name, value in entry.items() if name.startswith("become")}
        modules = NEED_ROOT & set(entry)
        assert takes == ({"become": True} if modules else {}), entry.get("name")
        assert not (takes and "delegate_to" in entry), entry.get("name")


def test_no_inventory_takes_root_for_a_host() -> None:
    for file in ROOT.glob("inventory/**/*.yml"):
        text = file.read_text(encoding="utf-8")
        assert "ansible_become:" not in text, file
        assert "ansible_user: root" not in text, file
