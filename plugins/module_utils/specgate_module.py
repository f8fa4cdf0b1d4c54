"""What the Specgate modules share: arguments, and the way from the engine's document to Ansible's result."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.specgate.options import Options

ARGUMENTS: dict[str, dict[str, Any]] = {
    "root": {"type": "path"},
    "python": {"type": "path"},
    "store": {"type": "path", "default": "/var/lib/specgate"},
    "environment": {"type": "dict", "default": {}},
    "import_timeout": {"type": "float", "default": 180},
    "no_import": {"type": "bool", "default": False},
    "actor": {"type": "str"},
    "run_id": {"type": "str"},
}


def module(**arguments: dict[str, Any]) -> AnsibleModule:
    """Return a module with the shared arguments and its own."""
    return AnsibleModule(
        argument_spec={**ARGUMENTS, **arguments},
        required_one_of=[("root", "python")],
        supports_check_mode=True,
    )


def options(m: AnsibleModule) -> Options:
    """Return the engine's options; what the module was not given keeps the engine's default."""
    given = {
        field.name: m.params[field.name] for field in fields(Options) if m.params.get(field.name) is not None
    }
    bundle = given.get("bundle")
    if isinstance(bundle, str) and bundle.lstrip().startswith("{"):  # the lookup's text, and no path
        given["bundle"] = json.loads(bundle)
    env = {str(name): str(value) for name, value in m.params["environment"].items()}
    return Options(**given, env=env, check=m.check_mode, diff=m._diff)


def finish(
    m: AnsibleModule,
    document: dict[str, Any],
    fail: bool = True,
    **more: Any,
) -> None:
    """Leave the module with the engine's document, and with ``more`` beside it.

    With ``fail``, any outcome but ``passed`` fails the task, in one line that says what to do. The bundle is
    left out of the echoed parameters: it is long, and the document names it by its hash.
    """
    echo = {name: value for name, value in m.params.items() if name != "bundle"}
    result: dict[str, Any] = {
        "specgate": document,
        "changed": document["changed"],
        "invocation": {"module_args": echo},
        **more,
    }
    if document.get("diff"):
        result["diff"] = {"prepared": document["diff"]}
    if fail and document["outcome"] != "passed":
        m.fail_json(msg="; ".join(filter(None, (document["summary"], document.get("remedy")))), **result)
    m.exit_json(**result)
