"""Where the GPU's time goes in profiled steps: prints the largest kernels of each `TRACE.json.gz`."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path


def summary(trace: Path, largest: int = 14) -> str:
    """Kernel time by name, and how much of the profiled span the GPU was busy (streams overlapping count once)."""
    opener = gzip.open if trace.suffix == ".gz" else open
    with opener(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    if not kernels:
        return f"{trace.name}: no GPU activity"
    kernels.sort(key=lambda e: e["ts"])
    busy = 0.0
    reached = kernels[0]["ts"]
    for event in kernels:
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(reached, event["ts"]))
        reached = max(reached, end)
    span = reached - kernels[0]["ts"]
    time: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in kernels:
        time[event["name"]] += event["dur"]
        count[event["name"]] += 1
    lines = [
        f"{trace.name}: {len(kernels)} kernels, span {span / 1000:.2f} ms, GPU busy {100 * busy / span:.1f} %"
    ]
    lines += [
        f"  {us / 1000:9.3f} ms  {count[name]:5d} x  {name[:110]}" for name, us in time.most_common(largest)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(summary(Path(argument)))
