"""Renders a patch (``patch.yml`` and its templates) into the bundle that the engine takes (docs/bundle.md).

``python -m controller.render --out FILE`` writes the bundle; the same patch always gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "files" / "patches"
PATCH = PATCHES / "speculative-disable-batch-threshold"
FORMAT = 1

MANIFEST_KEYS = {"name", "version", "title", "flag", "definitions", "variants"}
VARIANT_KEYS = {"id", "sglang", "vars", "files"}
FILE_KEYS = {"path", "module", "create", "edits", "fingerprints", "markers", "marker_lines"}
EDIT_KEYS = {"id", "at", "place", "text"}


class PatchError(Exception):
    """The patch cannot be rendered; the text says where it is wrong and what to do."""


def render(patch: Path = PATCH) -> dict[str, Any]:
    """Return the bundle of the patch in the folder ``patch``.

    Raises PatchError when the manifest, a template or a fingerprint is missing or wrong.
    """
    return _Patch(patch).bundle()


def manifest(patch: Path = PATCH) -> dict[str, Any]:
    """Return the manifest ``patch.yml`` as written. Raises PatchError when it is missing or no mapping."""
    return _known(_yaml(patch / "patch.yml"), "patch.yml", MANIFEST_KEYS)


def digest(bundle: Mapping[str, Any]) -> str:
    """Return the sha256 of the bundle's canonical JSON, without its own key ``sha256``."""
    body = {key: value for key, value in bundle.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def dump(bundle: Mapping[str, Any]) -> str:
    """Return the bundle as the JSON text that is written to a file."""
    return json.dumps(bundle, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


class _Patch:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = manifest(folder)
        self.known_code: dict[str, Any] = {}
        if (folder / "fingerprints.yml").exists():
            self.known_code = _mapping(_yaml(folder / "fingerprints.yml"), "fingerprints.yml")
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(folder / "templates"),
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,  # Python source, not HTML
        )

    def bundle(self) -> dict[str, Any]:
        listed = _list(self.manifest, "variants", "patch.yml")
        variants = [self.variant(one, f"variants[{i}]") for i, one in enumerate(listed)]
        owner: dict[str, str] = {}
        for variant in variants:
            for version in variant["sglang"]:
                if version in owner:
                    both = f"{owner[version]} and {variant['id']}"
                    raise PatchError(f"SGLang {version} stands in two variants, {both}: keep one")
                owner[version] = variant["id"]
        bundle = {
            "specgate_bundle": FORMAT,
            **{key: _text(self.manifest, key, "patch.yml") for key in ("name", "version", "title")},
            "variants": variants,
        }
        if self.manifest.get("flag") is not None:
            bundle["flag"] = self.manifest["flag"]
        return {**bundle, "sha256": digest(bundle)}

    def variant(self, value: Any, where: str) -> dict[str, Any]:
        _known(value, where, VARIANT_KEYS)
        name = _text(value, "id", where)
        versions = _list(value, "sglang", where)
        if not all(isinstance(version, str) for version in versions):
            raise PatchError(f"{where} ({name}): sglang must hold texts; quote what YAML reads as a number")
        values = {**_mapping(value.get("vars") or {}, f"{where}.vars"), "variant": name, "sglang": versions}
        listed = _list(value, "files", where)
        files = [self.file(one, f"{name}: files[{i}]", values) for i, one in enumerate(listed)]
        return {"id": name, "sglang": versions, "files": files}

    def file(self, value: Any, where: str, values: Mapping[str, Any]) -> dict[str, Any]:
        _known(value, where, FILE_KEYS)
        path = _text(value, "path", where)
        where = f"{where} ({path})"
        if ("create" in value) == bool(value.get("edits")):
            raise PatchError(f"{where} needs either create or edits")
        file: dict[str, Any] = {"path": path, "module": _text(value, "module", where)}
        if "create" in value:
            file["create"] = self.python(_text(value, "create", where), where, values)
        else:
            file["edits"] = [
                self.edit(one, f"{where}: edits[{i}]", values) for i, one in enumerate(value["edits"])
            ]
        objects = value.get("fingerprints", [])
        if objects:
            file["fingerprints"] = [self.fingerprint(one, path, where, values["sglang"]) for one in objects]
        for key in ("markers", "marker_lines"):
            if key in value:
                file[key] = value[key]
        return file

    def edit(self, value: Any, where: str, values: Mapping[str, Any]) -> dict[str, Any]:
        _known(value, where, EDIT_KEYS)
        return {
            "id": _text(value, "id", where),
            "at": [dict(step) for step in _list(value, "at", where)],
            "place": _text(value, "place", where),
            "text": self.text(_text(value, "text", where), where, values),
        }

    def fingerprint(self, name: Any, path: str, where: str, versions: list[str]) -> dict[str, Any]:
        known = self.known_code.get(path, {}).get(name, {})
        missing = [version for version in versions if version not in known]
        if missing:
            raise PatchError(
                f"{where}: fingerprints.yml has no {name} of SGLang {', '.join(missing)}; "
                "run `python -m controller.fingerprints`"
            )
        return {"object": name, "sha256": {version: known[version] for version in versions}}

    def text(self, text: str, where: str, values: Mapping[str, Any]) -> str:
        """Render inline text, or the template that ``text`` names."""
        try:
            if text.endswith(".j2") and "\n" not in text:
                return self.templates.get_template(text).render(values)
            return self.templates.from_string(text).render(values)
        except jinja2.TemplateNotFound as error:
            raise PatchError(f"{where}: {self.folder / 'templates'} has no {error.name}") from error
        except jinja2.TemplateError as error:
            raise PatchError(f"{where}: {text.splitlines()[0]!r} cannot be rendered: {error}") from error

    def python(self, text: str, where: str, values: Mapping[str, Any]) -> str:
        source = self.text(text, where, values)
        try:
            compile(source, text, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise PatchError(f"{where}: {text} gives no Python: line {error.lineno}: {error.msg}") from error
        return source


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PatchError(f"{path} does not exist: a patch is a folder with a patch.yml") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PatchError(f"{path} is not YAML: {error}") from error


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PatchError(f"{where} must be a mapping")
    return value


def _known(value: Any, where: str, keys: set[str]) -> dict[str, Any]:
    unknown = sorted(set(_mapping(value, where)) - keys)
    if unknown:
        raise PatchError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(keys))}")
    return value


def _text(value: Mapping[str, Any], key: str, where: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or not text:
        raise PatchError(f"{where}: {key} must be a text")
    return text


def _list(value: Mapping[str, Any], key: str, where: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list) or not found:
        raise PatchError(f"{where}: {key} must be a list with entries")
    return found


def main() -> int:
    """Write the bundle to a file or to standard output; return the exit code."""
    parser = argparse.ArgumentParser("python -m controller.render", description="Render a patch to a bundle.")
    parser.add_argument("patch", nargs="?", type=Path, default=PATCH, help="folder with a patch.yml")
    parser.add_argument("--out", type=Path, help="file to write; default: standard output")
    options = parser.parse_args()
    try:
        bundle = render(options.patch)
    except PatchError as error:
        print(f"{options.patch}: {error}", file=sys.stderr)
        return 2
    if options.out is None:
        print(dump(bundle), end="")
    else:
        options.out.write_text(dump(bundle), encoding="utf-8")
        print(f"{options.out}: {bundle['name']} {bundle['version']}, sha256 {bundle['sha256']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
