"""What is taken from a journal: what the server does now, and why it died."""

import contextlib
import io
import subprocess
import sys
import traceback

import pytest
from specgate import journalctl
from specgate.journalctl import Entry


def entry(message: str, pid: int = 7, invocation: str = "b") -> Entry:
    return Entry("c", message, pid, invocation)


def python_says(*arguments: str) -> list[str]:
    """Return what Python itself writes when a program dies."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr.splitlines()


def a_chain() -> list[str]:
    """Return the traceback of one exception that was raised from another."""
    said = io.StringIO()
    with contextlib.suppress(RuntimeError):
        try:
            try:
                {}["key"]
            except KeyError as error:
                raise RuntimeError("no such kernel") from error
        except RuntimeError:
            traceback.print_exc(file=said)
            raise
    return said.getvalue().splitlines()


def test_a_traceback_of_python_is_found_whole() -> None:
    said = python_says("-c", "def f():\n  raise ValueError('no room')\nf()")
    assert journalctl.cause(["loading", *said, "more words"]) == said


def test_a_syntax_error_in_a_module_is_shown_with_its_place(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "args.py").write_text("f(a\n  b)\n")
    said = python_says("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import args")
    found = journalctl.cause(said)
    assert found == said
    assert "Perhaps you forgot a comma" in found[-1]


def test_a_syntax_error_in_the_program_itself_has_no_heading(tmp_path) -> None:  # type: ignore[no-untyped-def]
    program = tmp_path / "server.py"
    program.write_text("def f(:\n")
    assert journalctl.cause(["before", *python_says(str(program))])[-1].startswith("SyntaxError")


def test_chained_exceptions_are_one_traceback() -> None:
    said = a_chain()
    (found,) = journalctl.tracebacks(said)
    assert [line for line in found if line.strip()] == [line for line in said if line.strip()]
    assert found[-1] == "RuntimeError: no such kernel"


def test_the_cause_is_told_from_its_aftermath() -> None:
    cause = python_says("-c", "raise FileNotFoundError('model.safetensors')")
    aftermath = python_says("-c", "raise EOFError")
    assert journalctl.cause([*cause, "Rank 0 scheduler is dead", *aftermath]) == cause
    assert journalctl.cause(aftermath) == aftermath


def test_a_heading_in_the_middle_of_a_line_counts() -> None:
    said = python_says("-c", "raise ValueError('x')")
    found = journalctl.cause(["Scheduler hit an exception: " + said[0], *said[1:]])
    assert found == said


def test_without_a_traceback_the_last_lines_tell() -> None:
    assert journalctl.cause(["usage: launch_server", "error: unrecognized arguments: --x"])[-1].endswith(
        "--x"
    )


@pytest.mark.parametrize(
    ("lines", "doing"),
    [
        (["Load weight begin.", ""], "Load weight begin."),
        (["a.py:1: UserWarning: slow", "  warnings.warn("], "a.py:1: UserWarning: slow"),
        ([], None),
    ],
)
def test_activity_is_the_last_line_that_says_something(lines: list[str], doing: str | None) -> None:
    assert journalctl.activity(lines) == doing


def test_the_servers_words_are_its_own() -> None:
    entries = [
        entry("[2026-12-01 12:00:00 TP0] Load weight begin."),
        entry("specgate: 10 s: Load weight begin."),
        entry("Main process exited", pid=1),
        entry("shards: 50%\rshards: 100%"),
    ]
    assert journalctl.words(entries) == ["Load weight begin.", "shards: 100%"]


def test_only_the_last_start_counts() -> None:
    entries = [entry("old", invocation="a"), entry("new"), entry("Started", pid=1, invocation="")]
    assert journalctl.words(journalctl.of_last_start(entries)) == ["new"]
