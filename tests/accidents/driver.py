"""Runs one operation of the engine and kills itself, by SIGKILL, at a given step; without one it lists them.

python driver.py OPERATION OPTIONS.json [STEP]        STEP: its number, or its name
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from specgate import operations
from specgate.options import Options

seen: list[str] = []
fatal = sys.argv[3] if len(sys.argv) > 3 else None


def on_step(name: str) -> None:
    seen.append(name)
    if fatal in (name, str(len(seen) - 1)):
        os.kill(os.getpid(), signal.SIGKILL)


options = Options(**json.loads(Path(sys.argv[2]).read_text()), on_step=on_step)
document = getattr(operations, sys.argv[1])(options)
print(json.dumps({"steps": seen, "document": document}))
