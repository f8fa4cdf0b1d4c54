#!/usr/bin/python
"""Run gates on a running server."""

from __future__ import annotations

DOCUMENTATION = r"""
module: specgate_probe
short_description: Ask a running SGLang server whether it serves, how it is configured, and how it behaves
description:
  - Runs gates on a running server, in order, up to the first that does not pass. Changes nothing.
  - A gate that fails and a gate that is inconclusive both fail the task. RV(specgate.outcome) tells them
    apart. Inconclusive stops a rollout, and is no reason to roll back.
author: Specgate
options:
  gates:
    description:
      - V(health) is a real generation within O(deadline), whatever C(/health) says.
      - V(configuration) is the threshold that the running server reports.
      - V(behaviour) sends requests alone, at O(threshold), above it and alone again, and judges steps and
        tokens.
      - V(record) writes the server's answers to O(reference), for V(behaviour) to compare with after a patch.
    type: list
    elements: str
    choices: [health, configuration, behaviour, record]
    default: [health, configuration]
  url:
    description: Where the server listens.
    type: str
    default: http://127.0.0.1:30000
  unit:
    description: The server's unit. Its journal says what the server does and why it died.
    type: str
  api_key_file:
    description: A file on the host that holds the API key.
    type: path
  threshold:
    description: What the server must report. By default what it says.
    type: int
  deadline:
    description: Seconds for each gate.
    type: float
    default: 300
  near_tie:
    description: Two tokens whose log-probabilities are closer than this may be chosen either way, in nats.
    type: float
    default: 0.5
  reference:
    description: The file on the host that V(record) writes and V(behaviour) compares with.
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
    gates: [health, configuration, behaviour]
    unit: sglang@main.service
    threshold: 16
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
    m = AnsibleModule(
        argument_spec={
            "gates": {
                "type": "list",
                "elements": "str",
                "choices": list(serving.GATES),
                "default": ["health", "configuration"],
            },
            "url": {"type": "str", "default": serving.URL},
            "unit": {"type": "str"},
            "api_key_file": {"type": "path", "no_log": False},
            "threshold": {"type": "int"},
            "deadline": {"type": "float", "default": 300},
            "near_tie": {"type": "float", "default": serving.NEAR_TIE},
            "reference": {"type": "path"},
        },
    )
    document = serving.probe(**m.params)
    # the host may have several servers, and a rollout's last words are this line alone
    if m.params["unit"] and document["outcome"] != "passed":
        document["summary"] = f"{m.params['unit']}: {document['summary']}"
    finish(m, document)


if __name__ == "__main__":
    main()
