"""Documentation of the action plugin of the same name, which does the work on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: specgate_lock
short_description: Let one rollout at a time change the fleet
description:
  - Takes the fleet's lock, a file on the controller, for the run of C(ansible-playbook) that calls it.
    The lock is free again when that process has ended, however it ended, or at its expiry.
  - A second operator is refused, and is told who holds the lock, since when and for which run.
  - It runs on the controller only, and takes no lock in check mode.
author: Specgate
options:
  path:
    description: The lock file. Everybody who deploys to the fleet from here must name the same one.
    type: path
    required: true
  owner:
    description: Who is at work.
    type: str
    required: true
  run_id:
    description: The run. Taking the lock again for the same run is no error.
    type: str
    required: true
  hours:
    description: After how many hours the lock is no longer believed.
    type: float
    default: 4
"""

EXAMPLES = r"""
- name: Take the fleet lock
  specgate_lock:
    path: /tmp/specgate-gpu.lock
    owner: "{{ specgate_actor }}"
    run_id: "{{ specgate_run_id }}"
  run_once: true
"""

RETURN = r"""
holder:
  description: What the lock file says now.
  returned: when taken
  type: dict
"""
