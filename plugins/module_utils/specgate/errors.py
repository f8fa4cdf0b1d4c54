"""What the engine raises when it will not, or cannot, go on."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Return ``text`` on one line, whatever a path or a bundle put into it."""
    return "\\n".join(text.splitlines())


class Refused(Exception):
    """The operation was refused before anything changed.

    ``summary`` says what was wrong and where, ``remedy`` what to do; ``diff`` shows a drift.
    """

    def __init__(self, summary: str, remedy: str | None = None, diff: str | None = None) -> None:
        super().__init__(summary)
        self.summary = one_line(summary)
        self.remedy = remedy
        self.diff = diff


class Interrupted(BaseException):
    """A signal asked the engine to stop: what it was doing is undone on the way out."""
