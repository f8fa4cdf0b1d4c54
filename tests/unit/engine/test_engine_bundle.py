"""A bundle that is wrong is refused, and the refusal says where it is wrong."""

from __future__ import annotations

import copy
import json
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specgate import bundle as bundles
from specgate.errors import Refused

from tests.unit.engine import mini


def refusal(change):
    document = copy.deepcopy(mini.bundle())
    change(document)
    document["sha256"] = bundles.digest(document)
    with pytest.raises(Refused) as caught:
        bundles.parse(document, "bundle b")
    return caught.value.summary


def file(document, number=0):
    return document["variants"][0]["files"][number]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(specgate_bundle=2), "specgate_bundle is 2, must be 1"),
        (lambda d: d.update(extra=1), "extra is no known key"),
        (lambda d: d.update(variants=[]), "variants must be a list with entries"),
        (lambda d: d.update(name=""), "name must be a text"),
        (lambda d: d["variants"].append({**d["variants"][0], "id": "twin"}), "twin has SGLang 0.5.9"),
        (lambda d: file(d).update(path="sglang/../../etc/passwd.py"), "must be a plain path below sglang/"),
        (lambda d: file(d).update(path="/etc/passwd.py"), "must be a plain path below sglang/"),
        (lambda d: file(d).update(path="sglang/./x.py"), "must be a plain path below sglang/"),
        (lambda d: file(d).update(path="torch/x.py"), "must be a plain path below sglang/"),
        (lambda d: file(d).update(module="sglang.other"), "is not the module of sglang/srt/server_args.py"),
        (lambda d: file(d).update(edits=[]), "files[0] needs either create or edits"),
        (lambda d: file(d, 1).update(edits=file(d)["edits"]), "files[1] needs either create or edits"),
        (lambda d: file(d)["edits"][0].update(place="inside"), "edits[0].place must be one of before, after"),
        (
            lambda d: file(d)["edits"][0].update(at=[{"class": "A", "def": "b"}]),
            "at[0] must have exactly one",
        ),
        (lambda d: file(d)["edits"][0].update(at=[{"class": "A", "first": "b"}]), "'first' belongs to call"),
        (lambda d: file(d)["edits"][0].update(at=[{"if": "A", "branch": "elif"}]), "branch must be body or"),
        (lambda d: file(d).update(marker_lines="3"), "marker_lines must be a number"),
        (lambda d: file(d).update(markers=[""]), "markers must hold texts"),
        (lambda d: d["variants"][0]["files"].append(file(d)), "name a path twice"),
        (lambda d: d["flag"].update(option="-x"), "flag.option must start with --"),
        (lambda d: d["flag"].update(accept=["8"]), "flag.accept must hold pairs"),
        (lambda d: d["flag"].update(validator="x"), "flag.validator must be module:function"),
    ],
)
def test_wrong_bundle_is_refused(change, said):
    assert said in refusal(change)


def test_digest_is_that_of_the_canonical_json():
    """Judged by an independent spelling of the rule, and by sha256sum."""
    document = mini.bundle(title="größe ☃")
    body = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    done = subprocess.run(["sha256sum"], input=text.encode(), capture_output=True, check=True)
    assert document["sha256"] == done.stdout.split()[0].decode()


def test_altered_bundle_is_refused():
    document = mini.bundle()
    document["version"] = "1.0.1"
    with pytest.raises(Refused, match="it was altered"):
        bundles.parse(document, "bundle")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"null"])
def test_what_is_no_bundle(tmp_path, content):
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(Refused, match="bundle"):
        bundles.load(str(tmp_path / "b"))


def test_missing_bundle_and_local_version(tmp_path):
    with pytest.raises(Refused, match="cannot be read"):
        bundles.load(str(tmp_path / "absent"))
    bundle = bundles.load(mini.bundle())
    assert bundle.variant_for("0.5.9+cu128") is bundle.variants[0]
    assert bundle.variant_for("0.5.9.post1") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value, path=()):
    """Yield the path of every value inside a JSON document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield (*path, number)
            yield from places(inner, (*path, number))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_nothing_in_a_bundle_breaks_the_reader(data):
    """Whatever stands at any place of it, the reader returns a bundle or refuses: no traceback."""
    document = copy.deepcopy(mini.bundle())
    path = data.draw(st.sampled_from(sorted(places(document), key=str)))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(JSON)
    if path != ("sha256",):
        document["sha256"] = bundles.digest(document)
    try:
        bundles.parse(document, "bundle")
    except Refused as refused:
        assert "\n" not in refused.summary
