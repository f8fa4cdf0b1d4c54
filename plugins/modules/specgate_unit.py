#!/usr/bin/python
"""Install and start a unit, or remove it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: specgate_unit
short_description: Install a systemd unit and start it until it serves, or remove it
description:
  - Checks the unit before it is written, from a folder of its own and under its real name. Anything that
    C(systemd-analyze verify) says about it fails the task, and so does an exposure above O(exposure). Check
    mode checks as well.
  - Restarts a running unit when its text changed, or with O(restart). Otherwise leaves it alone.
  - A start that fails shows the traceback from the journal, and no retry of systemd is left behind.
  - Drop-ins are never touched.
author: Specgate
options:
  name:
    description: Name of the unit, with C(.service).
    type: str
    required: true
  content:
    description: The unit's text.
    type: str
  state:
    description: Whether the unit is to be there and running.
    type: str
    choices: [started, absent]
    default: started
  restart:
    description: Restart the unit although its text did not change.
    type: bool
    default: false
  exposure:
    description: The exposure that C(systemd-analyze security) may give the unit. 0 is best, 100 worst.
    type: int
    default: 100
  timeout:
    description: Seconds for stopping and starting.
    type: float
    default: 2400
attributes:
  check_mode:
    support: full
    description: Nothing is written, started or stopped.
  diff_mode:
    support: full
    description: Shows the diff of the unit.
"""

EXAMPLES = r"""
- name: Start a server
  specgate_unit:
    name: sglang@main.service
    content: "{{ lookup('ansible.builtin.template', 'sglang.service.j2') }}"
"""

RETURN = r"""
restarted:
  description: Whether a running unit was restarted.
  returned: always
  type: bool
notes:
  description: What systemd said about other units while it checked this one.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.specgate import unit_file


def main() -> None:
    """Install or remove."""
    m = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "content": {"type": "str"},
            "state": {"type": "str", "choices": ["started", "absent"], "default": "started"},
            "restart": {"type": "bool", "default": False},
            "exposure": {"type": "int", "default": 100},
            "timeout": {"type": "float", "default": 2400},
        },
        required_if=[("state", "started", ("content",))],
        supports_check_mode=True,
    )
    p = m.params
    try:
        if p["state"] == "absent":
            result = unit_file.remove(p["name"], m.check_mode, p["timeout"])
        else:
            result = unit_file.start(
                p["name"], p["content"], p["exposure"], p["restart"], m.check_mode, p["timeout"]
            )
    except unit_file.UnitError as error:
        m.fail_json(msg=str(error))
    m.exit_json(
        changed=result.changed,
        restarted=result.restarted,
        notes=result.warnings,
        diff={
            "before": result.before,
            "after": result.after,
            "before_header": p["name"],
            "after_header": p["name"],
        },
    )


if __name__ == "__main__":
    main()
