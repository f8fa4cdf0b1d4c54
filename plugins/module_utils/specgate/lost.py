"""Finds a patch that the store has forgotten: its state, or the whole store, was lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from . import bundle as bundles
from . import fs
from .anchors import marker_lines
from .bundle import Bundle, File
from .document import count
from .installation import Installation
from .options import Options
from .survey import Survey


@dataclass(frozen=True)
class Lost:
    """Files that are not pristine though the store knows of no patch, and what to say of them."""

    paths: list[str]
    restorable: bool
    summary: str
    remedy: str


def remember(survey: Survey, options: Options) -> Lost | None:
    """Look for a forgotten patch, and put its files into the survey; None when there is none.

    Its markers tell it, where a bundle is at hand or in the store. Else every file that differs from RECORD
    is taken for one, but only while the store holds no backup at all: with one, the patch was rolled back,
    and what differs is not ours.
    """
    if survey.recorded is not None or survey.journal is not None:
        return None
    found, store = survey.installation, survey.store.store
    name, paths = None, []
    for bundle in _known(survey, options):
        variant = bundle.variant_for(found.version)
        paths = [file.path for file in variant.files if _patched(found, file)] if variant else []
        if paths:
            name = f"{bundle.name} {bundle.version}"
            break
    if not paths and not store.objects.exists():
        paths = found.changed_files()
    if not paths:
        return None
    for path in paths:
        survey.views[path] = survey.look(path, path[: -len(".py")].replace("/", "."))
    restorable = all(
        survey.views[path].pristine_sha256 is None or survey.pristine_bytes(path) is not None
        for path in paths
    )
    shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    what = (
        f"SGLang {found.version} is patched with {name} ({shown})"
        if name
        else f"{count(len(paths), 'file')} of SGLang {found.version} are not those of {found.oracle} ({shown})"
    )
    memory = "has forgotten it" if restorable else "knows of no patch and has no backup"
    remedy = (
        "rollback restores the files"
        if restorable
        else f"put the store back if you have a copy; else install SGLang anew ({found.reinstall}), then apply"
    )
    return Lost(paths, restorable, f"{what}, but the store {store.path} {memory}", remedy)


def _known(survey: Survey, options: Options) -> Iterator[Bundle]:
    if options.bundle is not None:
        yield bundles.load(options.bundle)
    yield from survey.store.store.bundles()


def _patched(found: Installation, file: File) -> bool:
    """Say whether the live file is what this bundle's part for it would leave."""
    live = fs.read(found.path(file.path))
    if live is None or fs.sha256(live) == found.pristine_sha256(file.path):
        return False
    if file.create is not None:
        return live == file.create.encode("utf-8")
    return bool(marker_lines(live, file.markers))
