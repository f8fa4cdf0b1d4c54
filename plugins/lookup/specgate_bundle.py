"""Render a patch into its bundle, on the controller."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

DOCUMENTATION = r"""
name: specgate_bundle
short_description: Render a patch into its bundle
description:
  - Renders C(files/patches/NAME) into the bundle that P(specgate_patch#module) takes, as one JSON text.
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
  description: One bundle for each term, as JSON.
  type: list
  elements: str
"""

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from controller.once import once
from controller.render import PatchError, dump, render


def _rendered(term: str) -> str:
    """Return a patch's bundle, rendered once a run."""

    def make() -> bytes:
        return dump(
            render(Path(term).expanduser() if "/" in term else ROOT / "files" / "patches" / term)
        ).encode()

    name = f"bundle-{hashlib.sha256(term.encode()).hexdigest()[:16]}.json"
    return once(constants.DEFAULT_LOCAL_TMP, name, make).read_text(encoding="utf-8")


def _bundle(term: str) -> str:
    """Return the bundle for one term. Raises AnsibleLookupError."""
    try:
        if not term.endswith(".json"):
            return _rendered(term)
        text = Path(term).expanduser().read_text(encoding="utf-8")
        json.loads(text)
        return text
    except (PatchError, OSError, ValueError) as error:
        raise AnsibleLookupError(f"{term}: {error}") from error


class LookupModule(LookupBase):
    """The lookup. A text, because Ansible would visit every value of a dictionary, for every host."""

    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[str]:
        """Return one bundle for each term."""
        return [_bundle(str(term)) for term in terms]
