"""Finds the SGLang installation, and knows which bytes of it are pristine."""

from __future__ import annotations

import ast
import base64
import contextlib
import csv
import hashlib
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from email.parser import BytesHeaderParser
from pathlib import Path
from urllib.parse import unquote, urlparse

from . import fs, interpreter
from .errors import Refused
from .interpreter import Interpreter
from .options import Options

_DIST_INFO = re.compile(r"sglang-[^-]+\.(dist-info|egg-info)\Z", re.IGNORECASE)
_VERSION_FILES = ("_version.py", "version.py")


@dataclass
class Installation:
    """One SGLang on this host. ``root`` is the real folder that holds ``sglang/``."""

    root: Path
    kind: str
    version: str
    dist_info: Path | None = None
    interpreter: Interpreter | None = None
    visible: bool | None = None
    others: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    record: dict[str, str] = field(default_factory=dict)
    _blobs: dict[str, bytes | None] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return the name of this installation in the store."""
        return hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]

    @property
    def oracle(self) -> str:
        """Return in words what says which bytes are pristine."""
        if self.kind == "wheel":
            return "RECORD"
        return "the commit" if self.kind in ("git", "editable") else "the hash given by the operator"

    @property
    def reinstall(self) -> str:
        """Return in words how to get every pristine file back without the store."""
        wheel = f"pip install --force-reinstall --no-deps sglang=={self.version}"
        return wheel if self.kind == "wheel" else "git checkout the files"

    def path(self, relative: str) -> Path:
        """Return where a file of the package lies."""
        return self.root.joinpath(*relative.split("/"))

    def pristine_sha256(self, relative: str) -> str | None:
        """Return the digest of a file's pristine bytes; None when the pristine package has no such file."""
        if relative in self.given:
            return self.given[relative]
        if self.kind == "wheel":
            return self.record.get(relative)
        if self.kind in ("git", "editable"):
            blob = self.commit_bytes(relative)
            return None if blob is None else fs.sha256(blob)
        return None

    def commit_bytes(self, relative: str) -> bytes | None:
        """Return a file as the git commit holds it, or None."""
        if self.kind not in ("git", "editable"):
            return None
        if relative not in self._blobs:
            self._blobs[relative] = _git(self.root, "cat-file", "blob", f"HEAD:./{relative}")
        return self._blobs[relative]

    def changed_files(self) -> list[str]:
        """Return the Python files of a wheel's package that do not equal its RECORD (missing ones too)."""
        return [
            path
            for path, digest in sorted(self.record.items())
            if path.startswith("sglang/") and path.endswith(".py") and _sha256_of(self.path(path)) != digest
        ]

    def describe(self, state: str) -> dict[str, object]:
        """Return the document's key ``installation``."""
        return {
            "root": str(self.root),
            "kind": self.kind,
            "version": self.version,
            "python": self.interpreter.path if self.interpreter else None,
            "visible": self.visible,
            "dist_info": str(self.dist_info) if self.dist_info else None,
            "others": self.others,
            "state": state,
            "notes": list(self.notes),
        }


def _sha256_of(path: Path) -> str | None:
    data = fs.read(path)
    return None if data is None else fs.sha256(data)


def find(options: Options) -> Installation:
    """Find the installation that ``--root`` or ``--python`` names. Raises Refused."""
    if options.root is None and options.python is None:
        raise Refused(
            "neither --root nor --python says which SGLang is meant",
            "give the server's interpreter: --python /path/to/venv/bin/python",
        )
    python = interpreter.ask(options.python, options.env) if options.python else None
    notes: list[str] = []
    if options.root is not None:
        root = _given_root(options.root)
        if python is None and not options.no_import:
            python = _venv_interpreter(root, options)
    else:
        assert python is not None
        root = _seen_by(python, notes)
    found = _describe(root, python)
    found.interpreter = python
    found.notes[:0] = notes
    found.given = {path: digest.lower() for path, digest in options.pristine.items()}
    found.others = _others(root, python)
    if python is not None:
        seen = python.sglang and Path(python.sglang).resolve()
        found.visible = seen == root / "sglang"
        if not found.visible:
            found.notes.append(f"{python.path} " + (f"imports {seen}" if seen else "sees no SGLang"))
    return found


def _given_root(text: str) -> Path:
    root = Path(text)
    if not root.is_dir():
        raise Refused(
            f"--root {text} is not a folder", "give the folder that holds sglang/ and its dist-info"
        )
    if not (root / "sglang" / "__init__.py").is_file():
        held = root.name == "sglang" and (root / "__init__.py").is_file()
        raise Refused(
            f"--root {text} holds no SGLang (no sglang/__init__.py)",
            f"give {root.parent}" if held else "give the folder that holds sglang/",
        )
    return _real_root(root / "sglang")


def _real_root(package: Path) -> Path:
    real = package.resolve()
    if real.name != "sglang":
        raise Refused(
            f"{package} is a link to {real}, which is not called sglang", "use an installation without it"
        )
    return real.parent


def _seen_by(python: Interpreter, notes: list[str]) -> Path:
    if python.sglang and Path(python.sglang, "__init__.py").is_file():
        return _real_root(Path(python.sglang))
    unseen = [
        str(folder)
        for folder in sorted(Path(python.prefix).glob("lib*/python3*/*-packages"))
        if (folder / "sglang" / "__init__.py").is_file()
    ]
    remedy = (
        f"there is one in {unseen[0]}, which it does not read: use the interpreter that does, or --root"
        if unseen
        else "install SGLang there, or give the server's own interpreter"
    )
    raise Refused(f"{python.path} (Python {python.version}) sees no SGLang", remedy)


def _venv_interpreter(root: Path, options: Options) -> Interpreter | None:
    """Return the interpreter of the virtual environment around ``root``, when there is one."""
    if root.name in ("site-packages", "dist-packages") and len(root.parents) > 2:
        for name in ("python", "python3"):
            path = root.parents[2] / "bin" / name
            if os.access(path, os.X_OK) and (root.parents[2] / "pyvenv.cfg").exists():
                with contextlib.suppress(Refused):
                    return interpreter.ask(str(path), options.env)
    return None


def _describe(root: Path, python: Interpreter | None) -> Installation:
    """Say what kind of installation ``root`` is, which version, and what its RECORD says."""
    own, elsewhere = _dist_infos([str(root)]), _dist_infos(python.sys_path if python else [])
    for info in own:
        record = _read_record(info)
        if any(path.startswith("sglang/") and path.endswith(".py") for path in record):
            version = _metadata_version(info) or _source_version(root) or "unknown"
            found = Installation(root, "wheel", version, info, record=record)
            if len(own) > 1:
                found.notes.append(
                    f"{len(own)} dist-info folders of SGLang lie in {root}; {info.name} was used"
                )
            return found
    editable = next((info for info in own + elsewhere if _points_to(info, root)), None)
    # a virtual environment may lie inside some other project's checkout
    held = _git(root, "cat-file", "-e", "HEAD:./sglang/__init__.py") is not None
    commit = _git(root, "rev-parse", "HEAD") if held else None
    version = (
        (_tag(root) if held else None)
        or (_metadata_version(editable) if editable else None)
        or _source_version(root)
        or "unknown"
    )
    if commit is None:
        found = Installation(root, "unknown", version, editable or (own[0] if own else None))
        found.notes.append("neither a RECORD nor a git commit says which bytes are pristine: give --pristine")
        return found
    found = Installation(root, "editable" if editable else "git", version, editable)
    found.notes.append(f"pristine is commit {commit.decode('ascii', 'replace').strip()[:12]}")
    return found


def _dist_infos(folders: list[str]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        with contextlib.suppress(OSError):
            found += sorted(path for path in Path(folder).iterdir() if _DIST_INFO.match(path.name))
    return found


def _read_record(info: Path) -> dict[str, str]:
    """Return path → hex sha256 for the files that a RECORD lists with one. (RECORD: PEP 376, PEP 427.)"""
    data = fs.read(info / "RECORD")
    found: dict[str, str] = {}
    for row in csv.reader((data or b"").decode("utf-8", "replace").splitlines()):
        if len(row) >= 2 and row[1].startswith("sha256="):
            text = row[1][len("sha256=") :]
            with contextlib.suppress(ValueError):
                found[row[0]] = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
    return found


def _metadata_version(info: Path) -> str | None:
    data = fs.read(info / "METADATA") or fs.read(info / "PKG-INFO")
    return BytesHeaderParser().parsebytes(data).get("Version") if data else None


def _source_version(root: Path) -> str | None:
    """Read ``__version__ = "…"`` from the package's version file without importing it."""
    for name in _VERSION_FILES:
        data = fs.read(root / "sglang" / name)
        if data is None:
            continue
        with contextlib.suppress(SyntaxError, ValueError):
            for node in ast.parse(data).body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                    if "__version__" in names and isinstance(node.value.value, str):
                        return node.value.value
    return None


def _points_to(info: Path, root: Path) -> bool:
    """Say whether a dist-info is that of an editable install of the tree at ``root``. (PEP 610, PEP 660.)"""
    data = fs.read(info / "direct_url.json")
    with contextlib.suppress(ValueError, AttributeError):
        said = json.loads((data or b"null").decode("utf-8"))
        if said and said.get("dir_info", {}).get("editable"):
            project = Path(unquote(urlparse(said["url"]).path)).resolve()
            return project == root or project in root.parents
    # older tools left no direct_url.json, only a .pth file or a finder beside the dist-info
    for helper in [*info.parent.glob("*sglang*.pth"), *info.parent.glob("__editable___sglang*finder.py")]:
        if str(root) in (fs.read(helper) or b"").decode("utf-8", "replace"):
            return True
    return False


def _git(root: Path, *arguments: str) -> bytes | None:
    """Run git in ``root`` and return what it prints; None when it fails or is not there."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # a checkout often belongs to another user than root; only plumbing that runs no hooks is used
    command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _tag(root: Path) -> str | None:
    said = _git(root, "describe", "--tags", "--exact-match", "HEAD")
    match = re.fullmatch(r"v(\d[^-\s]*)", (said or b"").decode("ascii", "replace").strip())
    return match.group(1) if match else None


def _others(root: Path, python: Interpreter | None) -> list[dict[str, str]]:
    """Return the other SGLang trees that the interpreter's path and its dist-infos tell of."""
    found: dict[Path, str] = {}
    for folder in [str(root), *(python.sys_path if python else [])]:
        package = Path(folder) / "sglang"
        if (package / "__init__.py").is_file():
            place = package.resolve().parent
            if place != root:
                infos = _dist_infos([folder])
                version = (_metadata_version(infos[0]) if infos else None) or _source_version(place)
                found[place] = version or "unknown"
    for info in _dist_infos(python.sys_path if python else []):
        project, version = _project_of(info)
        if project is not None and project != root and (project / "sglang" / "__init__.py").is_file():
            found.setdefault(project, version)
    return [{"root": str(place), "version": version} for place, version in sorted(found.items())]


def _project_of(info: Path) -> tuple[Path | None, str]:
    """Return the source folder and version that an editable dist-info names (SGLang's lies in python/)."""
    version = _metadata_version(info) or "unknown"
    with contextlib.suppress(ValueError, KeyError, AttributeError):
        said = json.loads((fs.read(info / "direct_url.json") or b"null").decode("utf-8"))
        if said and said.get("dir_info", {}).get("editable"):
            project = Path(unquote(urlparse(said["url"]).path)).resolve()
            return (project / "python" if (project / "python" / "sglang").is_dir() else project), version
    return None, version
