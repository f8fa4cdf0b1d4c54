"""What SSH said, out of the message in which Ansible hands it on."""

from __future__ import annotations

import re

# Ansible's preface; SSH's own words follow it
PREFACE = re.compile("(?:can be reached over|to the host via) ssh:")
# Ansible loses SSH's words when SSH ends before it has taken the module
UNHEARD = "SSH ended at once, as it does after Permission denied: log in by hand to see why (ssh -v)"
UNKNOWN_KEY = "; compare it with the key on the host itself, then put it into known_hosts"


def ssh_said(message: str, lost: str) -> str:
    """Return the last words of SSH as one line, with what to do where that is known.

    message: the ``msg`` of an unreachable result. lost: what to say when a connection ended under SSH, which it does
    without a word.
    """
    if "Broken pipe" in message:
        return UNHEARD
    # a warning comes in a frame of @, before the words that matter
    said = " ".join(line.strip() for line in PREFACE.split(message)[-1].strip().splitlines()[-2:])
    return (said or lost) + (UNKNOWN_KEY if "Host key" in said else "")
