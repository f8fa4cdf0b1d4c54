"""Looks at the files of a patch and says in which state each is. Changes nothing."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from . import fs
from .bundle import Bundle, File, Variant
from .errors import Refused
from .installation import Installation
from .store import InstallationStore


@dataclass
class View:
    """One file: what lies there, what is pristine, and what the store remembers of it.

    ``offered`` is the text of a file that the variant at hand creates; to find it there already is no drift.
    """

    path: str
    module: str
    live: bytes | None
    pristine_sha256: str | None
    remembered: dict[str, Any] | None
    offered: bytes | None = None

    @property
    def sha256(self) -> str | None:
        """Return the digest of what lies there; None when nothing does."""
        return None if self.live is None else fs.sha256(self.live)

    @property
    def state(self) -> str:
        """Return pristine, patched, drifted or absent."""
        if self.live is None:
            return "absent"
        if self.remembered and self.sha256 == self.remembered["patched_sha256"]:
            return "patched"
        return "pristine" if self.sha256 == self.pristine_sha256 else "drifted"

    @property
    def outdated(self) -> bool:
        """Say whether SGLang was changed underneath: pristine is no longer what it was when patched."""
        return self.remembered is not None and self.remembered["pristine_sha256"] != self.pristine_sha256

    @property
    def wrong(self) -> bool:
        """Say whether the file is neither pristine nor as patched on this very SGLang."""
        if self.state == "absent":
            return self.pristine_sha256 is not None
        if self.live == self.offered:
            return False
        return self.state == "drifted" or (self.state == "patched" and self.outdated)


class Survey:
    """Every file that a state or a variant names, and the state of the whole."""

    def __init__(
        self, installation: Installation, store: InstallationStore, variant: Variant | None = None
    ) -> None:
        self.installation = installation
        self.store = store
        self.recorded = store.state()
        self.journal = store.journal()
        remembered = {entry["path"]: entry for entry in (self.recorded or {}).get("files", [])}
        self.views = {path: self.look(path, entry["module"], entry) for path, entry in remembered.items()}
        for file in variant.files if variant else []:
            view = self.look(file.path, file.module, remembered.get(file.path))
            view.offered = None if file.create is None else file.create.encode("utf-8")
            self.views[file.path] = view
        if self.recorded and self.recorded["version"] != installation.version:
            installation.notes.append(
                f"SGLang was changed from {self.recorded['version']} to {installation.version} "
                f"underneath the patch of {self.recorded['since']}"
            )

    def look(self, path: str, module: str, remembered: dict[str, Any] | None = None) -> View:
        """Return the view of one file, as it is now."""
        live = fs.read(self.installation.path(path))
        return View(path, module, live, self.installation.pristine_sha256(path), remembered)

    @property
    def state(self) -> str:
        """Return pristine, patched, drifted or unfinished, for the whole installation."""
        if self.journal is not None:
            return "unfinished"
        views = self.views.values()
        if any(view.wrong for view in views):
            return "drifted"
        remembered = [view for view in views if view.remembered]
        if not any(view.state == "patched" for view in views):
            return "pristine"
        return "patched" if all(view.state == "patched" for view in remembered) else "drifted"

    def pristine_bytes(self, path: str) -> bytes | None:
        """Return a file's pristine bytes from the live file, the store or the commit; None when nowhere."""
        view = self.views.get(path) or self.look(path, "")
        if view.pristine_sha256 is None:
            return None
        if view.live is not None and view.sha256 == view.pristine_sha256:
            return view.live
        held = self.store.store.object(view.pristine_sha256)
        return held if held is not None else self.installation.commit_bytes(path)

    def pristine_of(self, file: File) -> bytes | None:
        """Return the pristine bytes for one file of a variant."""
        return self.pristine_bytes(file.path)

    def bundle_in_use(self) -> dict[str, Any] | None:
        """Return the document's key ``bundle`` from the store's memory, or None."""
        if not self.recorded:
            return None
        said: dict[str, Any] = dict(self.recorded["bundle"])
        said.update({"since": self.recorded["since"], "by": self.recorded["actor"]})
        return said

    def refuse_if_wrong(self) -> None:
        """Refuse files that are neither pristine nor as the store remembers them, with a diff."""
        wrong = [view for view in self.views.values() if view.wrong]
        if not wrong:
            return
        paths = ", ".join(view.path for view in wrong)
        again = self.installation.reinstall
        oracle = self.installation.oracle
        if any(view.outdated and view.state == "patched" for view in wrong):
            raise Refused(
                f"SGLang was changed underneath the patch, but not wholly: {paths} still as patched before",
                f"install it whole ({again}), then patch",
                self.drift_diff(wrong),
            )
        if self.installation.kind == "unknown" and any(view.pristine_sha256 is None for view in wrong):
            raise Refused(
                f"nothing says which bytes of {paths} are pristine: no RECORD, no git commit",
                "install SGLang from its wheel, or give --pristine PATH=SHA256 for each file",
            )
        if all(view.remembered is None and view.pristine_sha256 is None for view in wrong):
            raise Refused(
                f"{paths} exists, but is not part of SGLang {self.installation.version}",
                "move it away, then patch",
                self.drift_diff(wrong),
            )
        restore = "specgate rollback restores them (and keeps the changed ones)" if self.recorded else again
        raise Refused(
            f"drift: {paths} differs from {oracle}" + (" and from the patch" if self.recorded else ""),
            f"look at the diff; {restore}",
            self.drift_diff(wrong),
        )

    def drift_diff(self, views: list[View]) -> str:
        """Return a unified diff from pristine to live for each of ``views``."""
        parts = []
        for view in views:
            before = self.pristine_bytes(view.path)
            if before is None and view.pristine_sha256 is not None:
                parts.append(
                    f"{view.path}: the pristine bytes are not known here, only their sha256 "
                    f"{view.pristine_sha256}; the live file has {view.sha256}\n"
                )
            else:
                parts.append(unified(view.path, before, view.live))
        return "".join(parts)


def unified(path: str, before: bytes | None, after: bytes | None) -> str:
    """Return the unified diff of one file; None stands for a file that does not exist."""
    old, new = (
        (data or b"").decode("utf-8", "replace").splitlines(keepends=True) for data in (before, after)
    )
    lines = difflib.unified_diff(
        old,
        new,
        f"a/{path}" if before is not None else "/dev/null",
        f"b/{path}" if after is not None else "/dev/null",
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def describe(bundle: Bundle, variant: Variant | None) -> dict[str, Any]:
    """Return the document's key ``bundle`` for a bundle at hand."""
    return {
        "name": bundle.name,
        "version": bundle.version,
        "sha256": bundle.sha256,
        "variant": variant.id if variant else None,
    }
