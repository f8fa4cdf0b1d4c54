"""The lookup ``specgate_engine``: the engine as one zip file, for a host to keep."""

from __future__ import annotations

DOCUMENTATION = r"""
name: specgate_engine
short_description: The path of the engine as one zip file
description:
  - Packs the engine, the same source into the same bytes, and returns where the file lies on the controller.
author: Specgate
"""

EXAMPLES = r"""
- name: Install the engine
  ansible.builtin.copy:
    src: "{{ lookup('specgate_engine') }}"
    dest: /usr/local/lib/specgate/specgate.pyz
    mode: "0644"
"""

RETURN = r"""
_raw:
  description: The path.
  type: list
  elements: str
"""

import sys
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.plugins.lookup import LookupBase

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from controller import archive
from controller.once import once


class LookupModule(LookupBase):
    """Packs the engine."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[str]:
        """Return the path of the zip file, which lies in Ansible's own temporary folder."""
        return [str(once(constants.DEFAULT_LOCAL_TMP, "specgate.pyz", archive.engine))]
