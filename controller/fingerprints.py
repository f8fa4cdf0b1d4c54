"""Computes the fingerprints of the code that a patch changes inside, from SGLang's own wheels.

``python -m controller.fingerprints WHEEL...`` writes ``fingerprints.yml`` beside the patch's manifest, for
every version of its variants; `controller.render` reads it. What a fingerprint is: docs/bundle.md.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
import textwrap
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from controller.render import PATCH, PatchError, manifest

HEAD = "# Written by `python -m controller.fingerprints WHEEL...`: the code that the patch was tried with.\n"
Fingerprints = dict[str, dict[str, dict[str, str]]]  # path, object, version: digest


def fingerprint(source: str, dotted: str) -> str:
    """Return the sha256 of a class, function or method (``Class.method``) in ``source``. Raises KeyError."""
    block: Any = ast.parse(source)
    for name in dotted.split("."):
        named = [node for node in block.body if getattr(node, "name", None) == name]
        if len(named) != 1:
            raise KeyError(dotted)
        block = named[0]
    first = min([block.lineno, *(one.lineno for one in block.decorator_list)])
    lines = source.split("\n")[first - 1 : block.end_lineno]
    text = textwrap.dedent("\n".join(line.rstrip() for line in lines))
    return hashlib.sha256(text.encode()).hexdigest()


def version_of(wheel: Path) -> str:
    """Return the version in a wheel's file name (PEP 427)."""
    return wheel.name.split("-")[1]


def compute(patch: Path, wheels: Iterable[Path]) -> Fingerprints:
    """Return the fingerprints of all that the manifest lists.

    Raises PatchError when a version has no wheel, or its code lacks a listed object.
    """
    by_version = {version_of(wheel): wheel for wheel in wheels}
    found: Fingerprints = {}
    for variant in manifest(patch)["variants"]:
        for version in variant["sglang"]:
            if version not in by_version:
                raise PatchError(f"no wheel of SGLang {version} among those given")
            with zipfile.ZipFile(by_version[version]) as wheel:
                for file in variant["files"]:
                    for name in file.get("fingerprints", []):
                        source = wheel.read(file["path"]).decode()
                        try:
                            digest = fingerprint(source, name)
                        except KeyError as error:
                            raise PatchError(f"SGLang {version}: {file['path']} has no {name}") from error
                        found.setdefault(file["path"], {}).setdefault(name, {})[version] = digest
    return found


def main() -> int:
    """Write ``fingerprints.yml``; return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m controller.fingerprints", description="Fingerprint the code that a patch changes inside."
    )
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="of every version in it")
    parser.add_argument("--patch", type=Path, default=PATCH, help="folder with a patch.yml")
    options = parser.parse_args()
    try:
        found = compute(options.patch, options.wheels)
    except (PatchError, OSError, zipfile.BadZipFile) as error:
        print(f"{options.patch}: {error}", file=sys.stderr)
        return 2
    target = options.patch / "fingerprints.yml"
    target.write_text(HEAD + yaml.safe_dump(found, default_flow_style=False), encoding="utf-8")
    count = sum(len(versions) for objects in found.values() for versions in objects.values())
    print(f"{target}: {count} fingerprints")
    return 0


if __name__ == "__main__":
    sys.exit(main())
