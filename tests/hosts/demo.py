"""`make demo`: two hosts, a deploy, its gates, and a patch that is refused. The commands are those of the README."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from controller.render import digest, render
from tests.hosts import cli
from tests.hosts.machine import ROOT, Fleet

PATCH = ROOT / "files" / "patches" / "speculative-disable-batch-threshold"
BROKEN = ROOT / ".cache" / "broken-bundle.json"
INVENTORY = "inventory/local"


def show(*command: str, expect: int | None = 0) -> None:
    """Run one of the product's commands with its line in front; exit when its exit code is not the expected one."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    code = subprocess.run(
        [str(ROOT / ".venv/bin" / command[0]), *command[1:]], cwd=ROOT, stdin=subprocess.DEVNULL
    ).returncode
    print(f"(exit code {code})", flush=True)
    if (expect is None and code == 0) or (expect is not None and code != expect):
        sys.exit(
            "demo: that was not the expected exit code; `tests/hosts/testhost ssh gpu1` looks at the host"
        )


def write_broken_bundle() -> None:
    """The accident that Specgate exists for: the new flag in the middle of the call before it, not after it."""
    bundle = render(PATCH)
    file = next(f for f in bundle["variants"][0]["files"] if f["path"].endswith("server_args.py"))
    edit = next(e for e in file["edits"] if e["id"] == "argument")
    edit["place"] = "replace"
    edit["text"] = (
        "parser.add_argument(\n"
        '    "--speculative-accept-threshold-acc",\n'
        "    type=float\n"
        "    parser.add_argument(\n"
        '        "--speculative-disable-batch-threshold",\n'
        "        default=ServerArgs.speculative_disable_batch_threshold,\n"
        "    ),\n"
        "    default=ServerArgs.speculative_accept_threshold_acc,\n"
        ")\n"
    )
    file["marker_lines"] = 3  # grep alone would have been content
    bundle["version"] += "-broken"
    bundle["sha256"] = digest(bundle)
    BROKEN.write_text(json.dumps(bundle))


def main() -> int:
    """Bring the fleet up and walk through the story."""
    fleet = Fleet.here()
    print(
        "Bringing up gpu1 and gpu2: systemd, sshd, SGLang 0.5.9 from PyPI (the first time takes some minutes)",
        flush=True,
    )
    cli.bring_up(fleet, ["gpu1", "gpu2"])
    show("ansible-playbook", "playbooks/deploy.yml", "-i", INVENTORY)
    show("fab", "verify", "--inventory", INVENTORY)
    write_broken_bundle()
    broken = str(Path(BROKEN).relative_to(ROOT))
    show(
        "ansible-playbook",
        "playbooks/deploy.yml",
        "-i",
        INVENTORY,
        "-e",
        f"specgate_patch={broken}",
        expect=None,
    )
    show("fab", "status", "--inventory", INVENTORY)
    print(
        "\nThe broken patch was refused before it touched a file; both servers still run the good one.\n"
        f"Take the good one back too:   .venv/bin/fab rollback --inventory {INVENTORY}\n"
        "Look around on a host:        tests/hosts/testhost ssh gpu1\n"
        "Take the hosts away:          make demo-down"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
