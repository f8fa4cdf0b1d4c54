"""What preflight shows of a host beside its SGLang: room for the store, GPUs. Reads only."""

from __future__ import annotations

from pathlib import PurePosixPath

from .remote import Session


def free_mib(here: Session, store: str) -> int | None:
    """Return the free MiB where the store is or will be; None when ``df`` does not tell."""
    above = [store, *map(str, PurePosixPath(store).parents)]
    # df complains of those that do not exist yet, and tells of the others
    answer = here.execute(["df", "--block-size=1M", "--output=avail", "--", *above])
    numbers = [line for line in answer.stdout.decode("ascii", "replace").split() if line.isdigit()]
    return int(numbers[0]) if numbers else None


def gpus(here: Session) -> list[tuple[str, int]]:
    """Return name and free memory (MiB) of each GPU, as nvidia-smi prints them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader,nounits"]
    answer = here.execute(query)
    rows = [line.rpartition(", ") for line in answer.stdout.decode("utf-8", "replace").splitlines()]
    return [(name, int(free)) for name, _, free in rows if free.isdigit()] if answer.code == 0 else []
