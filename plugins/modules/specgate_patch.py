#!/usr/bin/python
"""Patch SGLang on this host, or take the patch back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: specgate_patch
short_description: Patch SGLang and prove it, or take the patch back
description:
  - With V(present), one remote execution backs up the pristine files, patches them as one transaction and
    runs the static gates (source, compile, import, flag). When a gate fails, the live files are as they were.
  - With V(absent), restores the pristine bytes and proves them by the wheel's C(RECORD).
  - The same bundle twice changes nothing.
author: Specgate
options:
  state:
    description: Whether the patch is to be in place.
    type: str
    choices: [present, absent]
    default: present
  bundle:
    description:
      - The rendered patch, from the lookup P(specgate_bundle#lookup), or the path of a bundle on the host.
      - Its hash is checked on the host.
    type: raw
  accept_unknown_code:
    description: Patch code whose fingerprint is unknown. The audit log says so.
    type: bool
    default: false
extends_documentation_fragment: [specgate]
attributes:
  check_mode:
    support: full
    description: Nothing is written.
  diff_mode:
    support: full
    description: Shows the unified diff of the source.
"""

EXAMPLES = r"""
- name: Patch SGLang
  specgate_patch:
    python: /opt/sglang/bin/python
    bundle: "{{ lookup('specgate_bundle', 'speculative-disable-batch-threshold') }}"

- name: Take the patch back
  specgate_patch:
    python: /opt/sglang/bin/python
    state: absent
"""

RETURN = r"""
units:
  description:
    - Services of SGLang, each with C(name), C(state), C(started) (seconds since the epoch), C(text) and
      C(outdated).
    - An outdated one runs, began before the files became what they are now, and so needs a restart.
  returned: always
  type: list
  elements: dict
specgate:
  description: The engine's document, as docs/engine.md describes it.
  returned: always
  type: dict
"""

from ansible.module_utils import specgate_host
from ansible.module_utils.specgate import operations
from ansible.module_utils.specgate_module import finish, module, options


def main() -> None:
    """Apply or roll back."""
    m = module(
        state={"type": "str", "choices": ["present", "absent"], "default": "present"},
        bundle={"type": "raw"},
        accept_unknown_code={"type": "bool", "default": False},
    )
    if m.params["state"] == "present" and not m.params["bundle"]:
        m.fail_json(msg="state=present needs a bundle: bundle: \"{{ lookup('specgate_bundle', NAME) }}\"")
    operation = operations.apply if m.params["state"] == "present" else operations.rollback
    document = operation(options(m))
    finish(m, document, units=specgate_host.units_after(document))


if __name__ == "__main__":
    main()
