"""Render a patch into its bundle, on the controller."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = r"""
name: specgate_bundle
short_description: Render a patch into its bundle
description:
  - Renders C(files/patches/NAME) into the bundle that P(specgate_patch#module) takes.
  - A path that ends in C(.json) is read as an already rendered bundle.
author: Specgate
options:
  _terms:
    description: Names of patches, folders that hold a C(patch.yml), or rendered bundles.
    required: true
"""

EXAMPLES = r"""
- name: Patch SGLang
  specgate_patch:
    python: /opt/sglang/bin/python
    bundle: "{{ lookup('specgate_bundle', 'speculative-disable-batch-threshold') }}"
"""

RETURN = r"""
_raw:
  description: One bundle for each term.
  type: list
  elements: dict
"""

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from controller.render import PatchError, render


@cache
def _bundle(term: str) -> dict[str, Any]:
    """Return the bundle for one term. Raises AnsibleLookupError."""
    try:
        if term.endswith(".json"):
            return json.loads(Path(term).expanduser().read_text(encoding="utf-8"))
        return render(Path(term).expanduser() if "/" in term else ROOT / "files" / "patches" / term)
    except (PatchError, OSError, ValueError) as error:
        raise AnsibleLookupError(f"{term}: {error}") from error


class LookupModule(LookupBase):
    """The lookup."""

    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        """Return one bundle for each term."""
        return [_bundle(str(term)) for term in terms]
