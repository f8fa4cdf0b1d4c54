#!/usr/bin/python
"""Say what is installed, what the store knows, or what happened."""

from __future__ import annotations

DOCUMENTATION = r"""
module: specgate_info
short_description: Say what SGLang is installed, in which state, and what happened to it
description:
  - Changes nothing, and fails on nothing that the engine can put into words. Read C(specgate.outcome).
author: Specgate
options:
  show:
    description:
      - V(inspect) looks at the installation. With O(bundle), it also says which variant fits.
      - V(status) says what the store knows.
      - V(history) gives the audit log.
    type: str
    choices: [inspect, status, history]
    default: inspect
  bundle:
    description: The rendered patch that is to fit.
    type: dict
  last:
    description: How many entries of the history. By default all of them.
    type: int
extends_documentation_fragment: [specgate]
attributes:
  check_mode:
    support: full
    description: There is nothing to change.
  diff_mode:
    support: none
    description: There is nothing to change.
"""

EXAMPLES = r"""
- name: What is installed?
  specgate_info:
    python: /opt/sglang/bin/python
  register: found

- name: The last five changes
  specgate_info:
    python: /opt/sglang/bin/python
    show: history
    last: 5
"""

RETURN = r"""
host:
  description: Free MiB for the store, Python, GPUs and their memory, units of SGLang.
  returned: with show=inspect
  type: dict
in_use:
  description: The bundle in use, by what the store knows, or null.
  returned: with show=inspect
  type: dict
specgate:
  description: The engine's document, as docs/engine.md describes it.
  returned: always
  type: dict
"""

from ansible.module_utils import specgate_host
from ansible.module_utils.specgate import operations
from ansible.module_utils.specgate_module import finish, module, options


def main() -> None:
    """Look."""
    m = module(
        show={"type": "str", "choices": ["inspect", "status", "history"], "default": "inspect"},
        bundle={"type": "dict"},
        last={"type": "int"},
    )
    operation = {"inspect": operations.inspect, "status": operations.status, "history": operations.history}
    show = m.params["show"]
    more = {}
    if show == "inspect":
        # what a failed deploy goes back to, in the same execution
        in_use = operations.status(options(m))["bundle"]
        more = {"host": specgate_host.describe(m.params["store"]), "in_use": in_use}
    finish(m, operation[show](options(m)), fail=False, **more)


if __name__ == "__main__":
    main()
