"""What the rendered module takes for granted of SGLang is there, in the source of each release."""

from __future__ import annotations

import ast
import re
import zipfile
from functools import cache

import pytest

from tests import wheels
from tests.patch.conftest import VERSIONS

MODULE = "sglang/srt/speculative/batch_threshold.py"


@cache
def source(version: str, module: str) -> ast.Module | None:
    """Return the syntax tree of a module in the wheel; None when it is no Python file there."""
    path = module.replace(".", "/")
    with zipfile.ZipFile(wheels.wheel(version)) as wheel:
        names = set(wheel.namelist())
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in names:
                return ast.parse(wheel.read(name))
    return None


def rendered(version: str) -> ast.Module:
    created = next(file["create"] for file in VERSIONS[version]["files"] if file["path"] == MODULE)
    return ast.parse(created)


def bound(tree: ast.Module) -> set[str]:
    """Return the names that a module binds, at any depth outside functions and classes."""
    names: set[str] = set()
    blocks: list[ast.AST] = [tree]
    while blocks:
        for node in ast.iter_child_nodes(blocks.pop()):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(target.id for target in targets if isinstance(target, ast.Name))
            else:
                blocks.append(node)
    return names


def class_named(version: str, name: str, module: str) -> ast.ClassDef:
    tree = source(version, module)
    assert tree is not None, module
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def attributes(version: str, name: str, module: str) -> set[str]:
    """Return the annotated fields and the methods of a class, with those of its bases in that module."""
    found: set[str] = set()
    pending = [name]
    while pending:
        here = class_named(version, pending.pop(), module)
        for node in here.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
        tree = source(version, module)
        assert tree is not None
        local = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        pending += [base.id for base in here.bases if isinstance(base, ast.Name) and base.id in local]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_import_exists(version):
    tree = rendered(version)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        assert node.module
        origin = source(version, node.module)
        for alias in node.names:
            submodule = source(version, f"{node.module}.{alias.name}")
            there = origin is not None and alias.name in bound(origin)
            assert there or submodule is not None, f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("EagleDraftInput", "sglang.srt.speculative.eagle_info"),
        ("EagleDraftExtendInput", "sglang.srt.speculative.eagle_info"),
        ("GenerationBatchResult", "sglang.srt.managers.utils"),
        ("ForwardBatch", "sglang.srt.model_executor.forward_batch_info"),
    ],
)
def test_every_keyword_is_a_field(version, name, module):
    calls = [
        node
        for node in ast.walk(rendered(version))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    fields = attributes(version, name, module) if calls else set()
    for call in calls:
        assert {keyword.arg for keyword in call.keywords} <= fields


@pytest.mark.parametrize("version", VERSIONS)
def test_every_attribute_set_on_a_batch_or_a_result_is_a_field(version):
    old = class_exists(version, "ModelWorkerBatch", "sglang.srt.managers.schedule_batch")
    batch = "ModelWorkerBatch" if old else "ScheduleBatch"
    fields = {
        "plain": attributes(version, batch, "sglang.srt.managers.schedule_batch"),
        "extend": attributes(version, batch, "sglang.srt.managers.schedule_batch")
        | attributes(version, "ForwardBatch", "sglang.srt.model_executor.forward_batch_info"),
        "result": attributes(version, "GenerationBatchResult", "sglang.srt.managers.utils"),
        "after": attributes(version, "EagleDraftInput", "sglang.srt.speculative.eagle_info"),
        "logits": attributes(version, "LogitsProcessorOutput", "sglang.srt.layers.logits_processor"),
    }
    stored = [
        node
        for node in ast.walk(rendered(version))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id in fields
    ]
    assert len(stored) > 10
    for node in stored:
        assert isinstance(node.value, ast.Name)
        assert node.attr in fields[node.value.id], f"{node.value.id}.{node.attr}"


def class_exists(version: str, name: str, module: str) -> bool:
    tree = source(version, module)
    body = tree.body if tree is not None else []
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in body)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_refusals_ask_for_fields_that_exist(version):
    check = next(
        node for node in rendered(version).body
        if isinstance(node, ast.FunctionDef) and node.name == "check_batch_threshold"
    )  # fmt: skip
    asked = {
        node.attr
        for node in ast.walk(check)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }
    # from 0.5.20 the class is put together from the groups in arg_groups/fields
    with zipfile.ZipFile(wheels.wheel(version)) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("sglang/srt/arg_groups/fields/")]
        text = "\n".join(wheel.read(name).decode() for name in ["sglang/srt/server_args.py", *names])
    ours = {"speculative_disable_batch_threshold"}
    missing = {name for name in asked - ours if f"    {name}: " not in text and f"def {name}(" not in text}
    assert missing == set()


OWNERS = {
    "target": "sglang/srt/model_executor/",
    "draft": "sglang/srt/model_executor/",
    "worker": "sglang/srt/speculative/eagle_worker_v2.py",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_attribute_of_the_runners_and_the_worker_is_set_somewhere(version):
    used: dict[str, set[str]] = {name: set() for name in OWNERS}
    for node in ast.walk(rendered(version)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            owner = node.value
            if isinstance(owner.value, ast.Name) and owner.value.id == "self" and owner.attr in used:
                used[owner.attr].add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "replaced":
            owner = node.args[0]
            if isinstance(owner, ast.Attribute) and owner.attr in used:
                used[owner.attr].update(keyword.arg for keyword in node.keywords if keyword.arg)
    assert all(used.values())
    with zipfile.ZipFile(wheels.wheel(version)) as wheel:
        for name, where in OWNERS.items():
            paths = [path for path in wheel.namelist() if path.startswith(where) and path.endswith(".py")]
            text = "\n".join(wheel.read(path).decode() for path in paths)
            set_there = {attribute for attribute in used[name] if is_set(text, attribute)}
            assert used[name] - set_there == set(), f"self.{name}"


def is_set(text: str, name: str) -> bool:
    """Say whether some class in ``text`` assigns or defines this attribute."""
    assigned = rf"\(?(self\.\w+, ?)*self\.{name}(: [^=\n]+)?(,| = )"
    return re.search(rf"^ +({assigned}|{name}: |def {name}\()", text, re.M) is not None


@pytest.mark.parametrize("version", VERSIONS)
def test_the_choice_rests_on_the_batch_size_alone(version):
    """All tensor-parallel ranks have the same batch; a clock, a rank or a random number would divide them."""
    tree = rendered(version)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == "choose_plain"]
    assert [ast.unparse(argument) for call in calls for argument in call.args] == ["len(batch.seq_lens)"]
    choice = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "choose_plain"
    )
    read = {node.id for node in ast.walk(choice) if isinstance(node, ast.Name)}
    own = {ast.unparse(node) for node in ast.walk(choice) if isinstance(node, ast.Attribute)}
    assert read <= {"self", "batch_size", "bound", "plain"}
    assert own == {"self.state", "self.plain", "self.log", "self.log.say"}


def called(call: ast.Call) -> str | None:
    """Return the name of the method that is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else None
