#!/usr/bin/python
"""Run the static gates on the live files."""

from __future__ import annotations

DOCUMENTATION = r"""
module: specgate_verify
short_description: Run the static gates on the live files
description:
  - Runs source, compile, import and flag gates against the bundle in use, or O(bundle). Changes nothing.
author: Specgate
options:
  bundle:
    description: The rendered patch to verify against. By default the one that the store says is in use.
    type: dict
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
- name: Verify the patch
  specgate_verify:
    python: /opt/sglang/bin/python
"""

RETURN = r"""
specgate:
  description: The engine's document, as docs/engine.md describes it.
  returned: always
  type: dict
"""

from ansible.module_utils.specgate import operations
from ansible.module_utils.specgate_module import finish, module, options


def main() -> None:
    """Verify."""
    m = module(bundle={"type": "dict"})
    finish(m, operations.verify(options(m)))


if __name__ == "__main__":
    main()
