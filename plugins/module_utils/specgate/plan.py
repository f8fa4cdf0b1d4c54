"""Works out what each file of a variant becomes, from pristine bytes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

from .anchors import AnchorError, Source
from .bundle import Bundle, File, Variant
from .errors import Refused
from .installation import Installation


@dataclass(frozen=True)
class Planned:
    """One file: the bundle's part for it, its pristine bytes (None: created) and its patched ones."""

    file: File
    pristine: bytes | None
    patched: bytes


def make(
    variant: Variant, pristine: Mapping[str, bytes | None], accept_unknown: bool
) -> tuple[list[Planned], list[str]]:
    """Return the planned files of ``variant``, and notes on accepted unknown code. Raises Refused."""
    planned: list[Planned] = []
    accepted: list[str] = []
    for file in variant.files:
        data = pristine[file.path]
        if file.create is not None:
            planned.append(Planned(file, None, file.create.encode("utf-8")))
            continue
        assert data is not None
        try:
            source = Source(data, file.path)
            for line in _unknown(source, file):
                if not accept_unknown:
                    raise Refused(
                        f"{line}: this code was never tried with the patch",
                        "use a bundle that knows it, or read the code and pass --accept-unknown-code",
                    )
                accepted.append(f"unknown code was accepted: {line}")
            planned.append(Planned(file, data, source.splice(file.edits)))
        except AnchorError as error:
            raise Refused(str(error), "use a bundle that fits this SGLang") from error
    return planned, accepted


def _unknown(source: Source, file: File) -> list[str]:
    """Return a line for each fingerprint of ``file`` that its code does not have."""
    lines = []
    for known in file.fingerprints:
        found = source.fingerprint(known["object"])
        if found not in known["sha256"].values():
            versions = ", ".join(sorted(known["sha256"]))
            what = f"{file.path}: {known['object']}"
            lines.append(f"{what} has fingerprint {found[:12]}…, which is not that of {versions}")
    return lines


def choose(
    bundle: Bundle, installation: Installation, pristine_of: Callable[[File], bytes | None]
) -> tuple[Variant, list[str]]:
    """Return the variant of ``bundle`` that fits, and notes. Raises Refused, saying what differs.

    The version decides. Only in a git or editable install, whose version may be that of no release, the
    fingerprints do: the one variant whose known code is all there.
    """
    variant = bundle.variant_for(installation.version)
    if variant is not None:
        return variant, []
    unfit: dict[str, str] = {}
    fit: list[Variant] = []
    for one in bundle.variants:
        try:
            make(one, {file.path: _or_refuse(file, pristine_of) for file in one.files}, False)
            if any(file.fingerprints for file in one.files):
                fit.append(one)
        except Refused as refusal:
            unfit[one.id] = refusal.summary
    if installation.kind in ("git", "editable") and len(fit) == 1:
        note = f"version {installation.version} is in no variant; its code is that of {fit[0].id}"
        return fit[0], [note]
    last = bundle.variants[-1]
    differs = unfit.get(last.id)
    what = f"; against {last.id}: {differs}" if differs else f"; the code itself fits {last.id}, untested"
    raise Refused(
        f"{bundle.name} {bundle.version} has no variant for SGLang {installation.version}{what}",
        f"use a bundle made for it; this one knows {', '.join(bundle.versions())}",
    )


def _or_refuse(file: File, pristine_of: Callable[[File], bytes | None]) -> bytes | None:
    data = pristine_of(file)
    if data is None and file.create is None:
        raise Refused(f"{file.path} does not exist in it, or is not pristine")
    return data
