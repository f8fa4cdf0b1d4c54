"""The filter ``specgate_ssh_said``: why a host could not be reached, in one line."""

from __future__ import annotations

DOCUMENTATION = r"""
name: specgate_ssh_said
short_description: Why a host could not be reached, in one line
description:
  - Takes the message of an unreachable result and returns what SSH said last, with what to do where that is known.
author: Specgate
options:
  _input:
    description: The C(msg) of the result.
    type: str
    required: true
  lost:
    description: What to say when the connection ended without a word of SSH.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Say why
  ansible.builtin.debug:
    msg: "{{ answer.msg | specgate_ssh_said('look whether the host is up') }}"
"""

RETURN = r"""
_value:
  description: The line.
  type: str
"""

import sys
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from controller.ssh_said import ssh_said


class FilterModule:
    """The filter."""

    def filters(self) -> dict[str, Any]:
        """Return it by its name."""
        return {"specgate_ssh_said": ssh_said}
