"""Finds the places of a patch in Python source by its syntax, and splices text in at statement boundaries.

A place is a walk down the syntax tree (docs/bundle.md, EDIT). Every step must match exactly one node; the
bytes outside the splice stay as they are: line endings, byte order mark and encoding included.
"""

from __future__ import annotations

import ast
import codecs
import difflib
import hashlib
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Step = Mapping[str, str]
Block = list[ast.stmt]
Definition = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SIMPLE = (
    ast.Expr,
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Return,
    ast.Raise,
    ast.Delete,
    ast.Pass,
    ast.Break,
    ast.Continue,
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
    ast.Assert,
)
STEP_KINDS = ("class", "def", "field", "call", "if", "statement", "import")
PLACES = ("before", "after", "first", "last", "replace")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class AnchorError(Exception):
    """A place that matched no node or several, or where text cannot be spliced in."""


class Source:
    """One Python file: its text, its lines with their endings, and its syntax tree."""

    def __init__(self, data: bytes, name: str) -> None:
        """Read the bytes of the file called ``name``; AnchorError when this Python cannot parse them."""
        self.name = name
        self._bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
        try:
            found = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
            self._encoding = "utf-8" if self._bom else found
            self.text = data[len(self._bom) :].decode(self._encoding)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(self.text, name)
        except (SyntaxError, ValueError, LookupError) as error:
            raise AnchorError(f"{name} cannot be parsed: {error}") from error
        if self._encode(self.text) != data:
            raise AnchorError(f"{name}: its encoding ({self._encoding}) cannot be written back byte for byte")
        # ast counts \r\n, \r and \n as line ends, and nothing else; str.splitlines() would find more
        self.lines = _LINE.findall(self.text)

    def _encode(self, text: str) -> bytes:
        return self._bom + text.encode(self._encoding)

    def splice(self, edits: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the file's bytes with all ``edits`` (docs/bundle.md, EDIT) in place.

        All are located in the text as it is before any is spliced. Raises AnchorError.
        """
        cuts = [self._cut(edit) for edit in edits]
        order = sorted(range(len(cuts)), key=lambda index: (cuts[index].start, cuts[index].end, index))
        out: list[str] = []
        done = 0
        for index in order:
            cut = cuts[index]
            if cut.start < done:
                raise AnchorError(f"{self.name}: edit '{cut.edit}' overlaps the edit before it (line {done})")
            out += self.lines[done : cut.start]
            if out and not out[-1].endswith(("\n", "\r")):
                out.append(cut.newline)
            out.append(cut.text)
            done = cut.end
        out += self.lines[done:]
        try:
            return self._encode("".join(out))
        except UnicodeEncodeError as error:
            raise AnchorError(
                f"{self.name} is {self._encoding}, which cannot hold the inserted text"
            ) from error

    def _cut(self, edit: Mapping[str, Any]) -> _Cut:
        name = str(edit["id"])
        try:
            match = self.find(edit["at"])
            start, end, model = self._lines_of(match, edit["place"])
        except AnchorError as error:
            raise AnchorError(f"{self.name}, edit '{name}': {error}") from error
        line = self.lines[model]
        indent = line[: len(line) - len(line.lstrip(" \t\f"))]
        ending = re.search(r"(?:\r\n|\r|\n)\Z", line) or re.search(r"\r\n|\r|\n", self.text)
        newline = ending.group() if ending else "\n"
        text = "".join(
            (indent + one if one.strip() else "") + newline for one in _text_lines(str(edit["text"]))
        )
        return _Cut(name, start, end, text, newline)

    def find(self, at: Sequence[Step]) -> Match:
        """Walk ``at`` down from the module and return the one node it leads to. Raises AnchorError."""
        match = Match(self.tree, [self.tree.body])
        walked: list[str] = []
        for step in at:
            if not match.blocks:
                raise AnchorError(f"{' > '.join(walked)} has no block to look into for {_say(step)}")
            match = self._one(step, match.blocks, " > ".join(walked) or "the module")
            walked.append(_say(step))
        return match

    def _one(self, step: Step, blocks: Sequence[Block], where: str) -> Match:
        kind = _kind(step)
        alike = list(_of_kind(kind, blocks))
        found = [node for node in alike if _matches(step, node)]
        if len(found) == 1:
            return self._enter(step, found[0])
        if found:
            places = ", ".join(f"line {node.lineno}: {_short(node)}" for node in found[:8])
            places += f" and {len(found) - 8} more" if len(found) > 8 else ""
            raise AnchorError(f"{_say(step)} in {where} matches {len(found)} places, not one: {places}")
        raise AnchorError(f"{_say(step)} in {where} matches nothing; {_near_misses(step, alike)}")

    def _enter(self, step: Step, node: ast.stmt) -> Match:
        if isinstance(node, Definition):
            return Match(node, [node.body])
        if not isinstance(node, ast.If):
            return Match(node, [])
        branch = step.get("branch")
        if branch == "body":
            return Match(node, [node.body], branch)
        if branch == "else":
            if not node.orelse:
                raise AnchorError(f"{_say(step)}: the `if` of line {node.lineno} has no else")
            if self._is_elif(node.orelse[0]):
                raise AnchorError(f"{_say(step)}: line {node.orelse[0].lineno} is an elif; name that `if`")
            return Match(node, [node.orelse], branch)
        return Match(node, [block for block in (node.body, node.orelse) if block])

    def _is_elif(self, node: ast.AST) -> bool:
        return isinstance(node, ast.If) and self._after_column(node.lineno, node.col_offset).startswith(
            "elif"
        )

    def _lines_of(self, match: Match, place: str) -> tuple[int, int, int]:
        """Return the lines to replace, as a half-open range, and the line whose indentation to take."""
        node = match.node
        if place in ("first", "last"):
            if not match.blocks:
                raise AnchorError(f"place '{place}' needs a class, a function or an if")
            block = match.blocks[0]
            self._stands_alone(block[0], head=True, tail=False)
            model = _first_line(block[0]) - 1
            if place == "last":
                self._stands_alone(block[-1], head=False, tail=True)
                end = _end_line(block[-1])
                return end, end, model
            if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None:
                self._stands_alone(block[0], head=False, tail=True)
                end = _end_line(block[0])
                return end, end, model
            return model, model, model
        if not isinstance(node, ast.stmt):
            raise AnchorError(f"place '{place}' needs a statement")
        if self._is_elif(node):
            raise AnchorError(f"place '{place}': line {node.lineno} is an elif, not a statement of its own")
        if place == "replace" and match.branch:
            raise AnchorError("place 'replace' takes the whole statement; leave out 'branch'")
        self._stands_alone(node, head=place != "after", tail=place != "before")
        start, end = _first_line(node) - 1, _end_line(node)
        if place == "before":
            return start, start, start
        return (end if place == "after" else start), end, start

    def _stands_alone(self, node: ast.stmt, head: bool, tail: bool) -> None:
        """Refuse a statement that shares its first or last line with other code."""
        first, last = _first_line(node), _end_line(node)
        if head:
            before = self._before_column(node.lineno, node.col_offset) if first == node.lineno else ""
            if before.strip():
                raise AnchorError(f"line {first} holds other code before `{_short(node)}`")
        if tail:
            after = self._after_column(last, node.end_col_offset or 0).strip().lstrip(";").strip()
            if after and not after.startswith("#"):
                raise AnchorError(f"line {last} holds other code after `{_short(node)}`")

    # columns of the syntax tree count UTF-8 bytes
    def _before_column(self, line: int, column: int) -> str:
        return self.lines[line - 1].encode("utf-8")[:column].decode("utf-8")

    def _after_column(self, line: int, column: int) -> str:
        return self.lines[line - 1].encode("utf-8")[column:].decode("utf-8")

    def fingerprint(self, dotted: str) -> str:
        """Return the digest of a class or function, such as ``EAGLEWorkerV2.verify`` (docs/bundle.md)."""
        match = Match(self.tree, [self.tree.body])
        for part in dotted.split("."):
            found = [
                node
                for block in match.blocks
                for node in block
                if isinstance(node, Definition) and node.name == part
            ]
            if len(found) != 1:
                places = ", ".join(str(node.lineno) for node in found) or "none"
                raise AnchorError(
                    f"{self.name}: {dotted}: '{part}' stands at lines {places}, must stand at one"
                )
            match = Match(found[0], [found[0].body])
        node = match.node
        assert isinstance(node, ast.stmt)
        lines = [line.rstrip() for line in self.lines[_first_line(node) - 1 : _end_line(node)]]
        indents = [line[: len(line) - len(line.lstrip())] for line in lines if line]
        # the common prefix of the least and the greatest is that of all
        low, high = min(indents), max(indents)
        common = 0
        while common < len(low) and low[common] == high[common]:
            common += 1
        return hashlib.sha256("\n".join(line[common:] for line in lines).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Match:
    """A matched node, and the blocks that later steps look into."""

    node: ast.Module | ast.stmt
    blocks: list[Block]
    branch: str = ""


@dataclass(frozen=True)
class _Cut:
    edit: str
    start: int
    end: int
    text: str
    newline: str


def marker_lines(data: bytes, markers: Sequence[str]) -> list[str]:
    """Return the lines that hold one of ``markers``, as ``grep -nF`` prints them."""
    needles = [marker.encode("utf-8") for marker in markers]
    return [
        f"{number}:{line.decode('utf-8', 'replace')}".rstrip("\r")
        for number, line in enumerate(data.split(b"\n"), 1)
        if any(needle in line for needle in needles)
    ]


def _text_lines(text: str) -> list[str]:
    lines = re.split(r"\r\n|\r|\n", text)
    return lines[:-1] if lines[-1] == "" else lines


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno] + [decorator.lineno for decorator in decorators])


def _end_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _kind(step: Step) -> str:
    return next(kind for kind in STEP_KINDS if kind in step)


def _of_kind(kind: str, blocks: Sequence[Block]) -> Iterator[ast.stmt]:
    """Yield the statements that a step of this kind looks at."""
    types: dict[str, Any] = {
        "class": ast.ClassDef,
        "def": (ast.FunctionDef, ast.AsyncFunctionDef),
        "field": (ast.AnnAssign, ast.Assign),
        "import": (ast.Import, ast.ImportFrom),
        "call": ast.Expr,
        "if": ast.If,
        "statement": SIMPLE,
    }
    for block in blocks:
        for node in _walk(block) if kind in ("call", "if", "statement") else block:
            fits = isinstance(node, types[kind])
            if fits and (kind != "call" or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))):
                yield node


def _walk(block: Block) -> Iterator[ast.stmt]:
    """Yield the statements of a block at any depth, in order, without entering functions and classes."""
    for node in block:
        yield node
        if isinstance(node, Definition):
            continue
        for name in ("body", "handlers", "cases", "orelse", "finalbody"):
            for child in getattr(node, name, []):
                yield from _walk([child] if isinstance(child, ast.stmt) else child.body)


def _labels(kind: str, node: Any) -> list[str]:
    """Return the spellings that a step of this kind may name ``node`` by."""
    if kind in ("class", "def"):
        return [node.name]
    if kind == "field":
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    if kind == "import":
        whole = isinstance(node, ast.Import)
        return [name.asname or (name.name.split(".")[0] if whole else name.name) for name in node.names]
    return [ast.unparse({"call": lambda: node.value.func, "if": lambda: node.test}.get(kind, lambda: node)())]


def _first_argument(node: Any) -> str:
    arguments = node.value.args
    constant = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else None
    return constant if isinstance(constant, str) else ""


def _matches(step: Step, node: ast.stmt) -> bool:
    kind = _kind(step)
    labels = _labels(kind, node)
    if kind in ("class", "def", "field", "import"):
        return step[kind] in labels
    if "first" in step and kind == "call" and _first_argument(node) != step["first"]:
        return False
    return any(fnmatchcase(label, step[kind]) for label in labels)


def _near_misses(step: Step, alike: Sequence[ast.stmt]) -> str:
    kind = _kind(step)
    wanted = step[kind]
    lines: dict[str, int] = {}
    if kind == "call" and "first" in step:
        wanted = step["first"]
        for node in alike:
            if any(fnmatchcase(label, step[kind]) for label in _labels(kind, node)):
                lines.setdefault(_first_argument(node), node.lineno)
    else:
        for node in alike:
            for label in _labels(kind, node):
                lines.setdefault(label, node.lineno)
    near = difflib.get_close_matches(wanted, [label for label in lines if label], n=3, cutoff=0.5)
    if near:
        return "near misses: " + ", ".join(f"line {lines[label]}: {_clip(label)}" for label in near)
    return f"{len(alike)} of that kind there, none alike"


def _say(step: Step) -> str:
    kind = _kind(step)
    extra = "".join(f" {key} {step[key]!r}" for key in ("first", "branch") if key in step)
    return f"{kind} {step[kind]!r}{extra}"


def _short(node: ast.stmt) -> str:
    return _clip(ast.unparse(node).splitlines()[0])


def _clip(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
