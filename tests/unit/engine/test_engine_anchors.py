"""Anchors: the right place or an error, and every byte outside the splice as it was."""

from __future__ import annotations

import ast
import codecs
import re
import subprocess
import textwrap
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specgate.anchors import AnchorError, Source, marker_lines

MARK = "SPECGATE_MARK = 1"


def splice(text, at, place="after", insert=MARK, name="file.py"):
    data = text if isinstance(text, bytes) else text.encode()
    return Source(data, name).splice([{"id": "edit", "at": at, "place": place, "text": insert}])


def error(text, at, place="after", insert=MARK):
    with pytest.raises(AnchorError) as caught:
        splice(text, at, place, insert)
    return str(caught.value)


# generated sources: classes with fields and methods, calls, branches, in any layout that Python allows

NAMES = ["alpha", "beta", "gamma", "größe", "δ"]
COMMENTS = st.sampled_from(["", "  # plain", "  # ünïcode ☃", "  #\x0cform feed"])
SIMPLE = st.sampled_from(
    ["x = 1", "f(1, 2)", "y: int = 3", "s = 'é\\n'", "t = '''a\n  b\n'''", "z = (1,\n     2)", "assert True"]
)


@st.composite
def sources(draw):
    """Return (bytes, name of the class, name of a field of it that occurs once)."""
    unit = draw(st.sampled_from(["    ", "\t", "  "]))
    newline = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    # tokenize finds no encoding declaration in a file whose lines end in \r alone
    encoding = draw(st.sampled_from(["utf-8", "bom"] + ["latin-1"] * (newline != "\r")))
    lines = []
    if encoding == "latin-1":
        lines.append("# -*- coding: latin-1 -*-")
    if draw(st.booleans()):
        lines.append('"""Docstring."""')

    def statement(indent):
        lines.extend((indent + draw(SIMPLE) + draw(COMMENTS)).split("\n"))

    for _ in range(draw(st.integers(0, 3))):
        statement("")
    lines.append("class Chosen:" + draw(COMMENTS))
    fields = draw(st.permutations(NAMES))[: draw(st.integers(1, 4))]
    for field in fields:
        for _ in range(draw(st.integers(0, 2))):
            lines.append(draw(st.sampled_from(["", "   ", unit + "# a comment"])))
        lines.append(f"{unit}{field}: int = 0{draw(COMMENTS)}")
        if draw(st.booleans()):
            statement(unit)
    lines.append(f"{unit}def method(self):")
    statement(unit * 2)
    for _ in range(draw(st.integers(0, 3))):
        statement("")
    text = newline.join(lines) + draw(st.sampled_from(["", newline]))
    if encoding == "latin-1":
        text = text.replace("☃", "ß").replace("δ", "ð")
        fields = [field.replace("δ", "ð") for field in fields]
    data = codecs.BOM_UTF8 + text.encode() if encoding == "bom" else text.encode(encoding)
    return data, draw(st.sampled_from(fields)), encoding


def parse(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(data)


def without_mark(data):
    """Take the marked lines out again, knowing nothing of syntax trees."""
    out, rest = [], data
    while rest:
        ends = [rest.find(end) + len(end) for end in (b"\r\n", b"\n", b"\r") if end in rest]
        size = min(ends) if ends else len(rest)
        if rest[size - 1 : size + 1] == b"\r\n":
            size += 1
        out.append(rest[:size])
        rest = rest[size:]
    return b"".join(line for line in out if b"SPECGATE_MARK" not in line)


@settings(max_examples=300, deadline=None)
@given(sources(), st.sampled_from(["before", "after"]))
def test_every_other_byte_stays(source, place):
    data, field, encoding = source
    result = splice(data, [{"class": "Chosen"}, {"field": field}], place)
    back = without_mark(result)
    assert back == data or back in (data + b"\n", data + b"\r\n", data + b"\r")
    found = next(node for node in parse(result).body if isinstance(node, ast.ClassDef))
    names = [node.target.id if isinstance(node, ast.AnnAssign) else ast.unparse(node) for node in found.body]
    mark = names.index("SPECGATE_MARK = 1")
    assert names[mark + (1 if place == "before" else -1)] == field
    if encoding == "bom":
        assert result.startswith(codecs.BOM_UTF8) and result.count(codecs.BOM_UTF8) == 1


@settings(max_examples=200, deadline=None)
@given(sources(), st.sampled_from(["first", "last"]), st.sampled_from(["class", "method"]))
def test_first_and_last_stay_inside_their_block(source, place, where):
    data, _, _ = source
    at = [{"class": "Chosen"}] + ([{"def": "method"}] if where == "method" else [])
    result = splice(data, at, place)
    block = next(node for node in parse(result).body if isinstance(node, ast.ClassDef)).body
    if where == "method":
        block = next(node for node in block if isinstance(node, ast.FunctionDef)).body
    assert ast.unparse(block[0 if place == "first" else -1]) == MARK
    back = without_mark(result)
    assert back == data or back.rstrip(b"\r\n") == data.rstrip(b"\r\n")


@settings(max_examples=100, deadline=None)
@given(sources())
def test_replacing_a_statement_by_itself_changes_nothing(source):
    data, field, _ = source
    lines = Source(data, "f").lines
    node = Source(data, "f").find([{"class": "Chosen"}, {"field": field}]).node
    own = lines[node.lineno - 1].strip(" \t")
    result = splice(data, [{"class": "Chosen"}, {"field": field}], "replace", own)
    assert result.rstrip(b"\r\n") == data.rstrip(b"\r\n")


@settings(max_examples=100, deadline=None)
@given(sources(), st.lists(st.sampled_from(["before", "after"]), min_size=2, max_size=5))
def test_several_edits_keep_their_order(source, places):
    data, field, _ = source
    at = [{"class": "Chosen"}, {"field": field}]
    edits = [
        {"id": str(i), "at": at, "place": p, "text": f"SPECGATE_MARK{i} = 1"} for i, p in enumerate(places)
    ]
    result = Source(data, "f").splice(edits)
    order = [ast.unparse(node) for node in ast.walk(parse(result)) if isinstance(node, ast.Assign)]
    marks = [text for text in order if text.startswith("SPECGATE_MARK")]
    wanted = [f"SPECGATE_MARK{i} = 1" for i, p in enumerate(places) if p == "before"]
    wanted += [f"SPECGATE_MARK{i} = 1" for i, p in enumerate(places) if p == "after"]
    assert marks == wanted


# steps

SAMPLE = '''\
import os.path
from a import b as c
if True:
    import hidden


class One:
    """Doc."""

    field: int = 0
    def method(self):
        call("x", 1)
        if self.ready:
            parser.add_argument("--one")
        elif self.later:
            parser.add_argument("--two")
        else:
            parser.add_argument("--three")
        with open("f") as f:
            for x in f:
                try:
                    raise KeyError(x)
                except KeyError:
                    return None
        def inner():
            parser.add_argument("--inner")

    @property
    @cached
    def decorated(self): return 1
    a = 1; b = 2
'''
METHOD = [{"class": "One"}, {"def": "method"}]


@pytest.mark.parametrize(
    ("at", "place", "above", "below"),
    [
        ([{"import": "os"}], "after", "import os.path", "from a import b as c"),
        ([{"import": "c"}], "before", "import os.path", "from a import b as c"),
        ([{"class": "One"}], "first", '    """Doc."""', ""),
        ([{"class": "One"}], "before", "", "class One:"),
        ([{"class": "One"}, {"field": "field"}], "after", "    field: int = 0", "    def method(self):"),
        ([*METHOD], "first", "    def method(self):", '        call("x", 1)'),
        ([*METHOD], "last", '            parser.add_argument("--inner")', ""),
        ([*METHOD, {"call": "call"}], "after", '        call("x", 1)', "        if self.ready:"),
        (
            [*METHOD, {"call": "*.add_argument", "first": "--two"}],
            "after",
            '            parser.add_argument("--two")',
            "        else:",
        ),
        (
            [*METHOD, {"if": "self.ready", "branch": "body"}],
            "last",
            '            parser.add_argument("--one")',
            "        elif self.later:",
        ),
        (
            [*METHOD, {"if": "self.later", "branch": "else"}],
            "first",
            "        else:",
            '            parser.add_argument("--three")',
        ),
        (
            [*METHOD, {"statement": "raise KeyError(*)"}],
            "before",
            "                try:",
            "                    raise KeyError(x)",
        ),
        (
            [*METHOD, {"statement": "return None"}],
            "after",
            "                    return None",
            "        def inner():",
        ),
        (
            [{"class": "One"}, {"def": "decorated"}],
            "before",
            "",
            "    @property",
        ),
        (
            [{"class": "One"}, {"def": "decorated"}],
            "after",
            "    def decorated(self): return 1",
            "    a = 1; b = 2",
        ),
        ([*METHOD, {"def": "inner"}, {"call": "*"}], "before", "        def inner():", None),
    ],
)
def test_steps_and_places(at, place, above, below):
    lines = splice(SAMPLE, at, place).decode().splitlines()
    number = next(i for i, line in enumerate(lines) if MARK in line)
    assert lines[number - 1] == above
    assert below is None or lines[number + 1] == below
    ast.parse("\n".join(lines))


def test_replace_takes_the_whole_statement():
    result = splice(
        SAMPLE, [{"class": "One"}, {"def": "decorated"}], "replace", "def decorated(self):\n    return 2"
    )
    assert result.decode() == SAMPLE.replace(
        "    @property\n    @cached\n    def decorated(self): return 1\n",
        "    def decorated(self):\n        return 2\n",
    )


@pytest.mark.parametrize(
    ("at", "place", "said"),
    [
        ([{"class": "Two"}], "after", "near misses|none alike"),
        ([*METHOD, {"call": "*.add_argument"}], "after", "matches 3 places.*line 14.*line 16.*line 18"),
        ([*METHOD, {"call": "*.add_argument", "first": "--on"}], "after", "near misses: line 14: --one"),
        ([*METHOD, {"call": "*.add_argument", "first": "--inner"}], "after", "matches nothing"),
        ([{"import": "hidden"}], "after", "matches nothing"),
        ([{"class": "One"}, {"field": "a"}], "after", "holds other code after"),
        ([{"class": "One"}, {"field": "b"}], "before", "holds other code before"),
        ([{"class": "One"}, {"def": "decorated"}], "first", "holds other code before"),
        ([*METHOD, {"if": "self.ready", "branch": "else"}], "first", "line 15 is an elif"),
        ([*METHOD, {"if": "self.later"}], "before", "line 15 is an elif"),
        ([*METHOD, {"if": "self.ready", "branch": "body"}], "replace", "leave out 'branch'"),
        ([*METHOD, {"statement": "raise *"}], "last", "needs a class, a function or an if"),
        ([{"import": "os"}, {"def": "x"}], "after", "import 'os' has no block"),
    ],
)
def test_wrong_places_are_named(at, place, said):
    message = error(SAMPLE, at, place)
    assert re.search(said, message), message
    assert "file.py, edit 'edit'" in message


@pytest.mark.parametrize("place", ["before", "after", "replace"])
def test_shared_line_is_seen_behind_non_ascii_text(place):
    """Columns of the syntax tree count UTF-8 bytes, not characters."""
    text = "a = 'ééééééééééé'; größe = 'ééééééééé'; c = 3\n"
    assert "holds other code" in error(text, [{"field": "größe"}], place)
    alone = "größe = 'ééééééééé'  # ééé\n"
    assert MARK in splice(alone, [{"field": "größe"}], place).decode()


def test_overlapping_edits_are_refused():
    at = [{"class": "One"}, {"field": "field"}]
    edits = [{"id": str(i), "at": at, "place": "replace", "text": "x = 1"} for i in range(2)]
    with pytest.raises(AnchorError, match="overlaps"):
        Source(SAMPLE.encode(), "f").splice(edits)


def test_text_that_the_encoding_cannot_hold():
    with pytest.raises(AnchorError, match="cannot hold"):
        splice(b"# coding: latin-1\nx = 1\n", [{"field": "x"}], insert="y = '\u2603'")


@pytest.mark.parametrize("data", [b"def f(:\n", b"x = 1\0", b"# coding: nonsense\nx = 1\n", b"\xff\xfe"])
def test_what_is_no_python_is_an_error(data):
    with pytest.raises(AnchorError, match="cannot be parsed"):
        Source(data, "f")


def test_lines_are_counted_as_python_counts_them():
    """A form feed and a Unicode line separator end no line, whatever str.splitlines() says."""
    text = "a = 1  #\x0c\x1c\u2028 comment\nb = 2\n"
    assert splice(text, [{"field": "b"}], "before").decode() == text.replace("b = 2", MARK + "\nb = 2")


# fingerprints and markers


def test_fingerprint_is_that_of_the_source_lines():
    source = Source(SAMPLE.encode(), "f")
    lines = SAMPLE.splitlines()[27:30]
    text = "\n".join(line.rstrip() for line in textwrap.dedent("\n".join(lines)).splitlines())
    done = subprocess.run(["sha256sum"], input=text, capture_output=True, text=True, check=True)
    assert source.fingerprint("One.decorated") == done.stdout.split()[0]
    moved = Source(
        SAMPLE.replace("\n", "\r\n").replace("class One", "\r\n# moved\r\nclass One").encode(), "f"
    )
    assert moved.fingerprint("One.decorated") == source.fingerprint("One.decorated")
    assert source.fingerprint("One.method") != source.fingerprint("One")
    with pytest.raises(AnchorError, match="'absent' stands at lines none"):
        source.fingerprint("One.absent")


def test_marker_lines_are_those_of_grep(tmp_path):
    data = b"alpha\r\nbeta \xff\n\ngamma alpha beta\nlast alpha"
    (tmp_path / "f").write_bytes(data)
    command = ["grep", "-a", "-nF", "-e", "alpha", "-e", "beta", tmp_path / "f"]
    grepped = subprocess.run(command, capture_output=True).stdout.replace(b"\r", b"")
    assert marker_lines(data, ["alpha", "beta"]) == grepped.decode(errors="replace").splitlines()
