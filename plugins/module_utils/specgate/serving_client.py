"""Talks to a running SGLang server over its HTTP interface, with the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# the name of the endpoint, and what it was called before
_INFO = ("/server_info", "/get_server_info")


class NoAnswer(Exception):
    """The server could not be reached, or did not answer in time. ``refused``: nothing listens there."""

    def __init__(self, reason: str, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class Rejected(Exception):
    """The server answered with an HTTP error; the text is what it said."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"HTTP {status}: {said}" if said else f"HTTP {status}")
        self.status = status


@dataclass
class Answer:
    """One request's tokens and when they came (``time.monotonic``)."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)


class Client:
    """A server at ``url``. ``api_key`` is sent as a bearer token and never shown."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        # a proxy of the environment must not see what is meant for this host
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def status(self, path: str, timeout: float) -> int:
        """Return the HTTP status of a GET. Raises NoAnswer."""
        try:
            with self._open(path, None, timeout) as response:
                return int(response.status)
        except Rejected as error:
            return error.status

    def info(self, timeout: float = 30.0) -> dict[str, Any]:
        """Return what the server says of itself. Raises NoAnswer or Rejected."""
        for path in _INFO:
            try:
                return self._json(path, None, timeout)
            except Rejected as error:
                if error.status != 404 or path == _INFO[-1]:
                    raise
        raise AssertionError

    def generate(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Return the answer to one POST /generate. Raises NoAnswer or Rejected."""
        return self._json("/generate", request, timeout)

    def load(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], timeout: float) -> list[Answer]:
        """Send all prompts at once, greedily, as one streamed request; return the answers in the same order.

        One request, so that they are in the same batch whatever the load of this machine. Raises NoAnswer or
        Rejected.
        """
        request = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [
                {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True} for length in lengths
            ],
            "stream": True,
        }
        answers = [Answer(list(prompt)) for prompt in prompts]
        for event in self._events("/generate", request, timeout):
            answer = answers[event.get("index", 0)]
            new, meta = event.get("output_ids") or [], event.get("meta_info") or {}
            # a stream is cumulative or incremental, depending on version and flags
            answer.tokens = (
                list(new) if len(new) == meta.get("completion_tokens") else answer.tokens + list(new)
            )
            answer.arrivals.append(time.monotonic())
            answer.meta = meta
        for answer, length in zip(answers, lengths):
            if len(answer.tokens) != length:
                raise NoAnswer(f"{len(answer.tokens)} of {length} tokens came, then the stream ended")
        return answers

    def _events(self, path: str, body: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        with self._open(path, body, timeout) as response:
            while True:
                try:
                    line = response.readline()
                except (OSError, http.client.HTTPException) as error:
                    raise NoAnswer(_reason(error)) from error
                if not line or line.startswith(b"data: [DONE]"):
                    return
                if time.monotonic() > deadline:
                    raise NoAnswer(f"no end of the answer within {timeout:.0f} s")
                if line.startswith(b"data: "):
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        raise Rejected(400, str((event["error"] or {}).get("message", event["error"])))
                    yield event

    def _json(self, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        with self._open(path, body, timeout) as response:
            try:
                said = json.loads(response.read())
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswer(_reason(error)) from error
            except ValueError as error:
                raise NoAnswer(f"{path} did not answer in JSON") from error
        if isinstance(said, list) and len(said) == 1:
            said = said[0]
        if not isinstance(said, dict):
            raise NoAnswer(f"{path} answered with something else than an object")
        return said

    def _open(self, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode("utf-8")
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            return self._opener.open(request, timeout=max(timeout, 0.1))
        except urllib.error.HTTPError as error:
            with error:
                raise Rejected(error.code, _said(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(
                _reason(error), refused=isinstance(_cause(error), ConnectionRefusedError)
            ) from error


def _cause(error: Exception) -> Exception:
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, Exception) else error


def _reason(error: Exception) -> str:
    cause = _cause(error)
    if isinstance(cause, (socket.timeout, TimeoutError)):
        return "no answer in time"
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def _said(error: urllib.error.HTTPError) -> str:
    """Return the server's own words in an HTTP error, in one line."""
    try:
        text = error.read(2000).decode("utf-8", "replace")
    except OSError:
        return ""
    try:
        said = json.loads(text)
        message = said.get("error", {}).get("message") or said.get("message") or said.get("detail") or text
    except (ValueError, AttributeError):
        message = text
    return " ".join(str(message).split())[:300]
