#!/usr/bin/python
"""Run gates on a running server."""

from __future__ import annotations

DOCUMENTATION = r"""
module: specgate_probe
short_description: Run gates on a running server
description:
  - Health is C(/health) and a real generation; configuration is what the server itself reports; behaviour is whether it stops
    speculating above the threshold, and speculates again below it, with the right tokens.
  - The gates run in the order given, up to the first that does not pass. An inconclusive gate fails the task, too.
author: Specgate
options:
  gates:
    description: Which gates, in this order.
    type: list
    elements: str
    choices: [health, configuration, behaviour, record]
    default: [health, configuration]
  url:
    description: Where the server answers, as seen from the host.
    type: str
    default: http://127.0.0.1:30000
  unit:
    description: The server's unit. Its journal says what it does and why it died.
    type: str
  api_key_file:
    description: File on the host that holds the API key.
    type: path
  deadline:
    description: Seconds for each gate.
    type: float
    default: 300
  threshold:
    description: The threshold that the server must report. By default, what it says.
    type: int
  near_tie:
    description: Tokens closer than this, in nats, may be chosen either way. By default the engine's.
    type: float
  reference:
    description: File on the host with the tokens to compare with; V(record) writes it.
    type: path
attributes:
  check_mode:
    support: none
    description: Skipped, since there may be no server yet.
  diff_mode:
    support: none
    description: There is nothing to change.
"""

EXAMPLES = r"""
- name: Does it obey?
  specgate_probe:
    unit: sglang@threshold.service
    url: http://127.0.0.1:30000
    gates: [health, configuration, behaviour]
    threshold: 24
"""

RETURN = r"""
specgate:
  description: The engine's document, as docs/engine.md describes it.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.specgate import serving
from ansible.module_utils.specgate_module import finish


def main() -> None:
    """Probe."""
    gates = {"type": "list", "elements": "str", "choices": list(serving.GATES), "default": ["health", "configuration"]}
    m = AnsibleModule(
        argument_spec={
            "gates": gates,
            "url": {"type": "str", "default": serving.URL},
            "unit": {"type": "str"},
            "api_key_file": {"type": "path", "no_log": False},
            "deadline": {"type": "float", "default": 300},
            "threshold": {"type": "int"},
            "near_tie": {"type": "float"},
            "reference": {"type": "path"},
        },
    )
    finish(m, serving.probe(**{name: value for name, value in m.params.items() if value is not None}))


if __name__ == "__main__":
    main()
