"""Code that is not what the patch was made for is refused, by each variant, before anything changes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import wheels
from tests.patch.conftest import VARIANTS

WORKER = "sglang/srt/speculative/eagle_worker_v2.py"
ARGS = "sglang/srt/server_args.py"
FIELDS = "sglang/srt/arg_groups/fields/spec.py"
LAST = {variant["id"]: variant["sglang"][-1] for variant in VARIANTS.values()}


def lines_of(text: str, *names: str) -> tuple[int, int]:
    """Return the first and the last line (from 0, end excluded) of a definition or field in ``text``."""
    block: ast.AST = ast.parse(text)
    for name in names:
        assert isinstance(block, (ast.Module, ast.ClassDef, ast.FunctionDef))
        block = next(node for node in block.body if name in (name_of(node), getattr(node, "name", None)))
    assert isinstance(block, ast.stmt) and block.end_lineno
    return block.lineno - 1, block.end_lineno


def name_of(node: ast.stmt) -> str | None:
    target = node.target if isinstance(node, ast.AnnAssign) else None
    return target.id if isinstance(target, ast.Name) else None


def change_within(text: str, names: tuple[str, ...], old: str, new: str) -> str:
    first, last = lines_of(text, *names)
    lines = text.split("\n")
    inside = "\n".join(lines[first:last])
    assert old in inside, old
    return "\n".join([*lines[:first], inside.replace(old, new, 1), *lines[last:]])


def renamed_function(text: str) -> str:
    names = ("EAGLEWorkerV2", "forward_batch_generation")
    return change_within(text, names, "def forward_batch_generation", "def forward_batch_generate")


def changed_branch(text: str) -> str:
    names = ("EAGLEWorkerV2", "forward_batch_generation")
    return change_within(text, names, ".spec_info is None:", ".spec_info == None:")


def second_branch(text: str) -> str:
    names = ("EAGLEWorkerV2", "forward_batch_generation")
    first, last = lines_of(text, *names)
    line = next(line for line in text.split("\n")[first:last] if ".spec_info is None:" in line)
    indent = line[: len(line) - len(line.lstrip())]
    return change_within(text, names, line, f"{line}\n{indent}    pass\n{line}")


def one_statement_more(text: str) -> str:
    return change_within(text, ("EAGLEWorkerV2", "verify"), ":\n", ":\n        torch.cuda.synchronize()\n")


def moved_field(text: str) -> str:
    owner = "Spec" if "class Spec(" in text else "ServerArgs"
    first, last = lines_of(text, owner, "speculative_accept_threshold_acc")
    lines = text.split("\n")
    moved = lines[first:last]
    return "\n".join([*lines[:first], *lines[last:], "", "class Elsewhere:", *moved, ""])


def moved_argument(text: str) -> str:
    lines = text.split("\n")
    (name,) = (i for i, line in enumerate(lines) if '"--speculative-accept-threshold-acc",' in line)
    end = next(i for i in range(name, len(lines)) if lines[i] == "        )")
    moved = [line[4:] for line in lines[name - 1 : end + 1]]
    return "\n".join([*lines[: name - 1], *lines[end + 1 :], "", "def add_elsewhere(parser):", *moved, ""])


def doubled_argument(text: str) -> str:
    lines = text.split("\n")
    (name,) = (i for i, line in enumerate(lines) if '"--speculative-accept-threshold-acc",' in line)
    end = next(i for i in range(name, len(lines)) if lines[i] == "        )")
    return "\n".join([*lines[: end + 1], *lines[name - 1 : end + 1], *lines[end + 1 :]])


def cases() -> list[tuple[str, str, Callable[[str], str]]]:
    found: list[tuple[str, str, Callable[[str], str]]] = []
    for variant in VARIANTS.values():
        version, paths = LAST[variant["id"]], {file["path"] for file in variant["files"]}
        found += [(version, WORKER, change) for change in (renamed_function, changed_branch, second_branch)]
        found.append((version, FIELDS if FIELDS in paths else ARGS, moved_field))
        edits = {edit["id"] for file in variant["files"] for edit in file.get("edits", [])}
        if "argument" in edits:
            found += [(version, ARGS, change) for change in (moved_argument, doubled_argument)]
    return found


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def mutate(root: Path, path: str, change: Callable[[str], str]) -> None:
    file = root / path
    text = file.read_text(encoding="utf-8")
    mutated = change(text)
    assert mutated != text
    compile(mutated, path, "exec", dont_inherit=True)
    file.write_text(mutated, encoding="utf-8")
    wheels.declare_pristine(root, [path])


def label(value: object) -> str:
    return getattr(value, "__name__", None) or Path(str(value)).name


@pytest.mark.parametrize(("version", "path", "change"), cases(), ids=label)
def test_no_anchor_no_patch(version, path, change, tree, specgate):
    root = tree(version)
    mutate(root, path, change)
    before = snapshot(root)
    # even an operator who takes unknown code upon themselves is told that there is no place for it
    for options in ((), ("--accept-unknown-code",)):
        refused = specgate("apply", root, *options)
        assert refused["outcome"] == "refused" and refused["exit_code"] == 2
        assert path in refused["summary"] or "forward_batch_generation" in refused["summary"]
        assert refused["remedy"]
        assert snapshot(root) == before


@pytest.mark.parametrize("version", LAST.values())
def test_unknown_code_is_refused_unless_accepted(version, tree, specgate):
    root = tree(version)
    mutate(root, WORKER, one_statement_more)
    before = snapshot(root)
    refused = specgate("apply", root)
    assert refused["exit_code"] == 2 and "EAGLEWorkerV2.verify" in refused["summary"]
    assert snapshot(root) == before
    assert specgate("apply", root, "--accept-unknown-code")["exit_code"] == 0


def test_a_version_without_a_variant_is_refused_with_what_differs(tree, specgate):
    root = tree("0.5.23")
    info = next(root.glob("sglang-*.dist-info"))
    for name in ("METADATA", "RECORD"):
        text = (info / name).read_text(encoding="utf-8")
        (info / name).write_text(text.replace("0.5.23", "0.5.99"), encoding="utf-8")
    info.rename(info.with_name("sglang-0.5.99.dist-info"))
    mutate(root, WORKER, changed_branch)
    refused = specgate("apply", root)
    assert refused["exit_code"] == 2
    assert "0.5.99" in refused["summary"] and WORKER in refused["summary"]
