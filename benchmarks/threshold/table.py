"""Write a README's tables from the results: `python -m benchmarks.threshold.table [--summary] [--into FILE]`."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "threshold"
MARKERS = ("<!-- threshold-table -->", "<!-- /threshold-table -->")
TITLES = {
    "none": "no speculation",
    "eagle3": "static EAGLE3",
    "threshold": "EAGLE3 with the threshold",
    "zero-step": "SGLang's zero-step",
}


def results(folder: Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """All results by file name."""
    return [(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def baseline(concurrency: int, threshold: int) -> str:
    """The server that the threshold must not fall behind at this concurrency."""
    return "none" if concurrency > threshold else "eagle3"


def one(document: dict[str, Any]) -> str:
    """One result as a Markdown table: tokens a second, and the ratios to what each side competes with."""
    medians = document["medians"]
    columns = sorted(medians["threshold"], key=int)
    lines = [
        "| tokens a second at concurrency | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, title in TITLES.items():
        if name in medians:
            cells = [f"{medians[name][c]:.0f}" if c in medians[name] else "-" for c in columns]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    for key, title in (("medians", "ratio"), ("medians_steady", "ratio, decoding alone")):
        cells = []
        for column in columns:
            other = document[key].get(baseline(int(column), document["threshold"]), {}).get(column)
            ours = document[key]["threshold"].get(column)
            cells.append(f"{ours / other:.3f}" if ours and other else "-")
        lines.append(f"| **{title}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def caption(document: dict[str, Any]) -> str:
    """What was measured, in a line."""
    machine = document["machine"]
    repeats = 1 + max(row["repeat"] for row in document["measurements"])
    return (
        f"**SGLang {machine['sglang']}, {document['attention_backend']}**: "
        f"{machine['gpu']}, N = {document['threshold']}, "
        f"accept length {document['accept_length']} simulated, {document['prompt_tokens']} prompt and "
        f"{document['new_tokens']} new tokens, medians of up to {repeats} rounds"
    )


def tables(beside: Path) -> str:
    """Every result with its caption; links are relative to the folder `beside`."""
    parts = []
    for name, document in results():
        link = os.path.relpath(RESULTS / f"{name}.json", beside)
        parts += [f"{caption(document)} ([{name}.json]({link}))", one(document)]
    return "\n\n".join(parts)


def ratio(document: dict[str, Any], concurrency: str, server: str = "threshold") -> str:
    """A server's throughput over that of its competitor at this concurrency; a dash where one was not measured."""
    medians = document["medians"]
    ours = medians.get(server, {}).get(concurrency)
    other = medians.get(baseline(int(concurrency), document["threshold"]), {}).get(concurrency)
    return f"{ours / other:.2f}" if ours and other else "-"


def summary(beside: Path) -> str:
    """One row a result: the ratios alone, and for comparison SGLang's own way at the highest concurrency."""
    columns = ["1", "8", "32", "64", "128"]
    head = " | ".join(["SGLang", "backend", "new tokens", *columns, "zero-step at 128"])
    lines = [f"| {head} |", "|---" * (len(columns) + 4) + "|"]
    for name, document in results():
        link = os.path.relpath(RESULTS / f"{name}.json", beside)
        cells = [
            f"[{document['machine']['sglang']}]({link})",
            document["attention_backend"],
            str(document["new_tokens"]),
        ]
        cells += [ratio(document, column) for column in columns]
        lines.append(f"| {' | '.join([*cells, ratio(document, '128', 'zero-step')])} |")
    return "\n".join(lines)


def insert(text: str, content: str) -> str:
    """Replace what stands between the markers in `text`; raises ValueError unless the opening one is there once."""
    start, end = MARKERS
    if text.count(start) != 1:
        raise ValueError(f"the text must hold the marker {start} once, not {text.count(start)} times")
    if end not in text:
        text = text.replace(start, f"{start}\n{end}")
    return re.sub(
        re.escape(start) + ".*?" + re.escape(end), lambda _: f"{start}\n{content}\n{end}", text, flags=re.S
    )


def main() -> None:
    """Print the tables, or put them into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="a Markdown file with the marker " + MARKERS[0])
    parser.add_argument("--summary", action="store_true", help="ratios only, a line a result")
    chosen = parser.parse_args()
    write = summary if chosen.summary else tables
    if chosen.into:
        chosen.into.write_text(insert(chosen.into.read_text(), write(chosen.into.resolve().parent)))
    else:
        print(write(Path.cwd()))


if __name__ == "__main__":
    main()
