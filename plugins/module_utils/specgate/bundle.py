"""Reads a bundle (docs/bundle.md), checks it whole, and picks the variant that fits."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .anchors import PLACES, STEP_KINDS
from .errors import Refused

FORMAT = 1
_RENDER_AGAIN = "render the bundle again from its patch (fab bundle --out FILE)"


def digest(document: Mapping[str, Any]) -> str:
    """Return the sha256 of a bundle's canonical JSON, without its own key ``sha256``."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class File:
    """One file of a variant: either ``create`` or ``edits``."""

    path: str
    module: str
    create: str | None
    edits: list[dict[str, Any]]
    fingerprints: list[dict[str, Any]]
    markers: list[str]
    marker_lines: int | dict[str, list[str]] | None


@dataclass(frozen=True)
class Variant:
    """The files for a set of exact SGLang versions."""

    id: str
    sglang: list[str]
    files: list[File]


@dataclass(frozen=True)
class Bundle:
    """A checked bundle; ``document`` is the JSON it came from."""

    name: str
    version: str
    sha256: str
    variants: list[Variant]
    flag: dict[str, Any] | None
    document: dict[str, Any] = field(repr=False)

    def variant_for(self, version: str) -> Variant | None:
        """Return the variant for an SGLang version (``0.5.9+cu128`` counts as ``0.5.9``), or None."""
        public = version.split("+")[0]
        return next((one for one in self.variants if version in one.sglang or public in one.sglang), None)

    def versions(self) -> list[str]:
        """Return every SGLang version that has a variant."""
        return [version for variant in self.variants for version in variant.sglang]


def load(source: str | Mapping[str, Any]) -> Bundle:
    """Read a bundle from a path, from standard input (``-``) or from its JSON object. Raises Refused."""
    if isinstance(source, Mapping):
        return parse(dict(source), "the bundle")
    name = "standard input" if source == "-" else source[:100]
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise Refused(f"bundle {name} cannot be read: {error.strerror}", "give a rendered bundle") from error
    try:
        document = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise Refused(f"bundle {name} is not JSON: {error}", _RENDER_AGAIN) from error
    if not isinstance(document, dict):
        raise Refused(f"bundle {name} is not a JSON object", _RENDER_AGAIN)
    return parse(document, f"bundle {name}")


def parse(document: dict[str, Any], name: str) -> Bundle:
    """Check a bundle's JSON object and return it as a Bundle. Raises Refused and says where it is wrong."""
    try:
        if document.get("specgate_bundle") != FORMAT:
            raise _Wrong("specgate_bundle", f"is {document.get('specgate_bundle')!r}, must be {FORMAT}")
        _known(document, "", {"specgate_bundle", "name", "version", "title", "variants", "flag", "sha256"})
        stated, computed = _text(document, "sha256", ""), digest(document)
        if stated != computed:
            raise _Wrong("sha256", f"is {stated[:12]}…, but the content has {computed[:12]}…: it was altered")
        variants = [_variant(one, f"variants[{i}]") for i, one in enumerate(_list(document, "variants", ""))]
        seen: dict[str, str] = {}
        for variant in variants:
            for version in variant.sglang:
                if version in seen:
                    raise _Wrong(f"variant {variant.id}", f"has SGLang {version}, as {seen[version]} has")
                seen[version] = variant.id
        return Bundle(
            _text(document, "name", ""),
            _text(document, "version", ""),
            computed,
            variants,
            _flag(document["flag"]) if document.get("flag") is not None else None,
            document,
        )
    except _Wrong as wrong:
        raise Refused(f"{name}: {wrong.where} {wrong.what}", _RENDER_AGAIN) from wrong


class _Wrong(Exception):
    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what)
        self.where = where
        self.what = what


def _known(value: Any, where: str, keys: set) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(where or "it", "is not an object")
    unknown = sorted(set(value) - keys)
    if unknown:
        raise _Wrong(f"{where}.{unknown[0]}".lstrip("."), "is no known key")
    return value


def _text(value: Mapping[str, Any], key: str, where: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or not text:
        raise _Wrong(f"{where}.{key}".lstrip("."), "must be a text")
    return text


def _list(value: Mapping[str, Any], key: str, where: str, default: list | None = None) -> list[Any]:
    found = value.get(key, default)
    if not isinstance(found, list) or (default is None and not found):
        raise _Wrong(
            f"{where}.{key}".lstrip("."), "must be a list" + (" with entries" if default is None else "")
        )
    return found


def _texts(value: Mapping[str, Any], key: str, where: str, default: list | None = None) -> list[str]:
    found = _list(value, key, where, default)
    if not all(isinstance(one, str) and one for one in found):
        raise _Wrong(f"{where}.{key}", "must hold texts")
    return found


def _variant(value: Any, where: str) -> Variant:
    _known(value, where, {"id", "sglang", "files"})
    files = [_file(one, f"{where}.files[{i}]") for i, one in enumerate(_list(value, "files", where))]
    paths = [file.path for file in files]
    if len(set(paths)) != len(paths):
        raise _Wrong(f"{where}.files", "name a path twice")
    return Variant(_text(value, "id", where), _texts(value, "sglang", where), files)


def _file(value: Any, where: str) -> File:
    _known(value, where, {"path", "module", "create", "edits", "fingerprints", "markers", "marker_lines"})
    path, module = _text(value, "path", where), _text(value, "module", where)
    parts = PurePosixPath(path).parts
    # a bundle may reach into the package only, whatever it says
    if parts[0] != "sglang" or ".." in parts or "/".join(parts) != path or "\\" in path or "\0" in path:
        raise _Wrong(f"{where}.path", f"{path!r} must be a plain path below sglang/")
    if module not in _module_names(parts):
        raise _Wrong(f"{where}.module", f"{module!r} is not the module of {path}")
    create, edits = value.get("create"), _list(value, "edits", where, [])
    if (create is None) == (not edits):
        raise _Wrong(where, "needs either create or edits")
    if create is not None and not isinstance(create, str):
        raise _Wrong(f"{where}.create", "must be a text")
    for i, edit in enumerate(edits):
        _edit(edit, f"{where}.edits[{i}]")
    fingerprints = _list(value, "fingerprints", where, [])
    for i, one in enumerate(fingerprints):
        here = f"{where}.fingerprints[{i}]"
        _known(one, here, {"object", "sha256"})
        _text(one, "object", here)
        known = one.get("sha256")
        if not isinstance(known, dict) or not known or not all(isinstance(v, str) for v in known.values()):
            raise _Wrong(f"{here}.sha256", "must be {version: digest}")
    lines = value.get("marker_lines")
    if not (
        lines is None or (isinstance(lines, int) and not isinstance(lines, bool)) or isinstance(lines, dict)
    ):
        raise _Wrong(f"{where}.marker_lines", "must be a number or {version: [lines]}")
    return File(path, module, create, edits, fingerprints, _texts(value, "markers", where, []), lines)


def _module_names(parts: tuple[str, ...]) -> list[str]:
    if not parts[-1].endswith(".py"):
        return []
    dotted = ".".join(parts)[: -len(".py")]
    return [dotted[: -len(".__init__")]] if dotted.endswith(".__init__") else [dotted]


def _edit(value: Any, where: str) -> None:
    _known(value, where, {"id", "at", "place", "text"})
    _text(value, "id", where)
    if not isinstance(value.get("text"), str):
        raise _Wrong(f"{where}.text", "must be a text")
    if value.get("place") not in PLACES:
        raise _Wrong(f"{where}.place", f"must be one of {', '.join(PLACES)}")
    for i, step in enumerate(_list(value, "at", where)):
        here = f"{where}.at[{i}]"
        _known(step, here, {*STEP_KINDS, "first", "branch"})
        kinds = [kind for kind in STEP_KINDS if kind in step]
        if len(kinds) != 1 or not all(isinstance(text, str) for text in step.values()):
            raise _Wrong(here, f"must have exactly one of {', '.join(STEP_KINDS)}, and texts as values")
        if ("first" in step and kinds != ["call"]) or ("branch" in step and kinds != ["if"]):
            raise _Wrong(here, "'first' belongs to call, 'branch' to if")
        if step.get("branch", "body") not in ("body", "else"):
            raise _Wrong(f"{here}.branch", "must be body or else")


def _flag(value: Any) -> dict[str, Any]:
    _known(value, "flag", {"option", "field", "accept", "refuse", "validator"})
    if not _text(value, "option", "flag").startswith("--"):
        raise _Wrong("flag.option", "must start with --")
    _text(value, "field", "flag")
    _texts(value, "refuse", "flag", [])
    for pair in _list(value, "accept", "flag"):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise _Wrong("flag.accept", "must hold pairs of a text and the value it parses to")
    validator = value.get("validator")
    if validator is not None and (not isinstance(validator, str) or validator.count(":") != 1):
        raise _Wrong("flag.validator", "must be module:function")
    return value
