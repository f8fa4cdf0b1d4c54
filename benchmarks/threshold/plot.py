"""Draw the results: `python -m benchmarks.threshold.plot [OUT.png]` (needs matplotlib)."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

from benchmarks.threshold.table import RESULTS, TITLES, results

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"none": "#888888", "eagle3": "#d9822b", "threshold": "#1f6fb2", "zero-step": "#b03a5b"}


def draw(out: Path) -> None:
    """One panel a result: throughput against concurrency, both on logarithmic axes."""
    found = results()
    columns = 3
    rows = -(-len(found) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False)
    for panel, (_name, document) in zip(panels.flat, found, strict=False):
        for server, title in TITLES.items():
            if server in document["medians"]:
                points = sorted((int(c), v) for c, v in document["medians"][server].items())
                panel.plot(*zip(*points, strict=True), marker="o", label=title, color=COLOURS[server])
        panel.axvline(document["threshold"] + 0.5, color="black", linewidth=0.8, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=10)
        panel.set_title(
            f"{document['machine']['sglang']}, {document['attention_backend']}, {document['new_tokens']} tokens",
            fontsize=10,
        )
        panel.set_xlabel("concurrent requests")
        panel.set_ylabel("tokens/s")
        panel.legend(fontsize=7)
    for panel in panels.flat[len(found) :]:
        panel.set_visible(False)
    figure.suptitle("Throughput on one H200, N = 16 (dotted): higher is better", fontsize=11)
    figure.tight_layout()
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "threshold.png")
