"""The renderer: the same patch gives the same bytes, and what is wrong in one is said clearly."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from specgate import bundle

from controller.render import PATCH, PatchError, digest, dump, render


def test_the_engine_takes_it_and_agrees_on_the_digest():
    rendered = render()
    assert bundle.load(rendered).sha256 == rendered["sha256"] == digest(rendered)


def test_the_same_patch_gives_the_same_bytes(tmp_path):
    out = tmp_path / "bundle.json"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "controller.render", "--out", str(out)]
    env = {"PYTHONHASHSEED": "7"}
    said = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert out.read_text(encoding="utf-8") == dump(render())


@pytest.fixture
def patch(tmp_path):
    return Path(shutil.copytree(PATCH, tmp_path / "patch"))


def rewrite(patch: Path, change) -> None:
    manifest = yaml.safe_load((patch / "patch.yml").read_text(encoding="utf-8"))
    manifest = copy.deepcopy(manifest)  # YAML's aliases share objects
    change(manifest)
    (patch / "patch.yml").write_text(yaml.safe_dump(manifest), encoding="utf-8")


def wrong(manifest, **values):
    manifest["variants"][0].update(values)


def wrong_file(manifest, **values):
    wrong(manifest, files=[{"path": "a.py", "module": "a", **values}])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(colour="red"), "unknown key 'colour'"),
        (lambda m: m.pop("title"), "title must be a text"),
        (lambda m: m.update(variants=[]), "variants must be a list with entries"),
        (lambda m: wrong(m, sglang=[0.5]), "quote what YAML reads as a number"),
        (lambda m: m["variants"][1].update(sglang=["0.5.9"]), "stands in two variants"),
        (lambda m: wrong(m, vars={}), "is undefined"),
        (lambda m: wrong_file(m), "needs either create or edits"),
        (lambda m: wrong_file(m, create="none.py.j2"), "has no none.py.j2"),
        (lambda m: wrong_file(m, create="def f(:"), "gives no Python: line 1"),
        (lambda m: wrong(m, sglang=["0.5.7"]), "fingerprints.yml has no"),
    ],
)
def test_what_is_wrong_is_said(patch, change, said):
    rewrite(patch, change)
    with pytest.raises(PatchError, match=said):
        render(patch)


def test_a_folder_that_is_no_patch(tmp_path):
    with pytest.raises(PatchError, match="does not exist"):
        render(tmp_path)
    (tmp_path / "patch.yml").write_text("a: [", encoding="utf-8")
    with pytest.raises(PatchError, match="is not YAML"):
        render(tmp_path)
