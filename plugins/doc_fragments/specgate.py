"""Options that every Specgate module shares."""

from __future__ import annotations


class ModuleDocFragment:
    """Documentation fragment ``specgate``."""

    DOCUMENTATION = r"""
options:
  root:
    description:
      - The folder that holds C(sglang/) and its C(dist-info).
      - Give this or O(python).
    type: path
  python:
    description:
      - The server's own interpreter. It is asked where SGLang is, and it runs the import gate.
    type: path
  store:
    description: Where pristine files, bundles, journals and the audit log live on the host.
    type: path
    default: /var/lib/specgate
  environment:
    description: Environment variables for the import and flag gates.
    type: dict
    default: {}
  import_timeout:
    description: Seconds for one import.
    type: float
    default: 180
  no_import:
    description:
      - Leave out the import and flag gates, for a tree whose dependencies are absent.
      - The gates are then reported as skipped.
    type: bool
    default: false
  actor:
    description: Who is at work, for the audit log. By default the user behind sudo.
    type: str
  run_id:
    description: The same for every host of one run, for the audit log. By default a random one.
    type: str
"""

    RETURN = r"""
specgate:
  description:
    - The engine's document, as docs/engine.md describes it.
    - Among its keys are C(outcome), C(summary), C(remedy), C(installation), C(bundle), C(files), C(gates)
      and C(warnings).
  returned: always
  type: dict
"""
