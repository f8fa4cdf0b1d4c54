"""The gates ``health`` and ``configuration``, and waiting until a server serves.

``/health`` alone proves nothing: it has answered 200 while generation was dead, and 503 during a long prefill
of a server that was well. What counts is a generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from . import journalctl, systemd
from .gates import Gate, gate
from .serving_client import Client, NoAnswer, Rejected

FIELD = "speculative_disable_batch_threshold"
COUNTERS = "batch_threshold"
TOKENS = 4
_PROMPT_IDS = [10, 11, 12]
_PROMPT_TEXT = "The capital of France is"
_BUSY = ("Prefill batch", "Decode batch")
_Say = Callable[[str], None]


@dataclass
class Watched:
    """The server to watch: its unit, its process, or neither."""

    unit: str | None = None
    pid: int | None = None

    def __post_init__(self) -> None:
        self._started = systemd.start_time(self.pid) if self.pid else None
        found = systemd.show(self.unit) if self.unit else None
        self._invocation = found.invocation if found else None
        self._entries: list[journalctl.Entry] = []

    def death(self) -> str | None:
        """Return how the server died, or None while it lives (or when nothing can tell)."""
        # None: it was gone before the first look
        if self.pid and (self._started is None or systemd.start_time(self.pid) != self._started):
            found = systemd.show(self.unit) if self.unit else None
            ending = found.ending if found else None
            return f"process {self.pid} has ended" + (f": {ending}" if ending else "")
        if self.unit is None:
            return None
        found = systemd.show(self.unit)
        if found is None:
            return None
        if not found.loaded:
            return f"{self.unit} does not exist"
        if self.pid is None and found.dead:
            return f"{self.unit} is {found.state}"
        if self._invocation and found.invocation != self._invocation:
            return f"{self.unit} died and was started again"
        return None

    def lines(self) -> list[str]:
        """Return what the server wrote since its last start."""
        if self.unit is None:
            return []
        after = self._entries[-1].cursor if self._entries else None
        self._entries += journalctl.read(self.unit, after)
        if self._invocation:
            return journalctl.words([one for one in self._entries if one.invocation == self._invocation])
        return journalctl.words(journalctl.of_last_start(self._entries))

    def cause(self) -> list[str]:
        """Return why it died, as the journal has it."""
        return journalctl.cause(self.lines())


def wait(client: Client, watched: Watched, deadline: float, say: _Say, every: float = 10.0) -> Gate:
    """Wait until the server serves: a real generation, then ``/health``. Ends early when the server dies.

    ``deadline`` is in seconds; ``say`` gets what the server is doing: after ``every``
    seconds when that has changed, and after six times as long when it has not.
    """
    began = time.monotonic()
    attempt: _Attempt | None = None
    told, told_at = "", began
    while True:
        if attempt and attempt.finished:
            if attempt.proof and _status(client, 25.0) == 200:
                return _gate("passed", f"serves after {_since(began)}: {attempt.proof}", began)
            attempt = None
        elif attempt is None:
            attempt = _Attempt(client, began + deadline - time.monotonic())
        died = watched.death()
        if died:
            after = _since(began)
            time.sleep(1.0)  # for systemd and journald to write down the end
            reason = f"the server died after {after}: {watched.death() or died}"
            return _gate("failed", "nothing", began, watched.cause(), reason)
        doing = journalctl.activity(watched.lines()) or ""
        now = time.monotonic()
        if now - told_at >= (every if doing != told else 6 * every):
            say(f"{_since(began)}: {doing[:160]}")
            told, told_at = doing, now
        if now - began >= deadline:
            last = attempt.failure if attempt and attempt.failure else "no token came"
            reason = f"does not serve after {deadline:.0f} s: {last}"
            evidence = [f"/health says {_health_says(client)}", f"the server's last words: {doing or 'none'}"]
            return _gate("failed", "nothing", began, evidence, reason)
        time.sleep(0.5)


class _Attempt:
    """One generation in the background, so that a death is seen while it waits."""

    def __init__(self, client: Client, timeout: float) -> None:
        self.proof: str | None = None
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, args=(client, timeout), daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def _run(self, client: Client, timeout: float) -> None:
        try:
            self.proof = generate(client, timeout)
        except (NoAnswer, Rejected) as error:
            self.failure = str(error)


def health(client: Client, watched: Watched, deadline: float) -> Gate:
    """Prove that the server generates, within ``deadline`` seconds, whatever ``/health`` says."""
    began = time.monotonic()
    before = _progress(client, watched)
    while True:
        left = began + deadline - time.monotonic()
        refused = False
        try:
            proof = generate(client, left)
        except NoAnswer as error:
            failure, refused = str(error), error.refused
        except Rejected as error:
            failure = str(error)
            if error.status in (401, 403):
                return _gate("inconclusive", "nothing", began, reason=f"the server wants an API key: {error}")
        else:
            says = _health_says(client)
            note = "" if says == "200" else f"; /health says {says}, which is no failure: tokens come"
            return _gate("passed", proof + note, began)
        died = watched.death()
        if died:
            return _gate("failed", "nothing", began, watched.cause(), f"the server is not running: {died}")
        if time.monotonic() - began >= deadline:
            break
        time.sleep(0.5)
    says = _health_says(client)
    if refused:
        return _gate("failed", "nothing", began, reason=f"nothing listens at {client.url}: {failure}")
    after = _progress(client, watched)
    if after != before:
        reason = f"no token for this gate within {deadline:.0f} s, but the server works for others"
        return _gate("inconclusive", "it is busy", began, [f"/health says {says}"], reason)
    reason = f"no token within {deadline:.0f} s, though the port is open: {failure}"
    evidence = [f"/health says {says}" + (", which is not true" if says == "200" else "")]
    return _gate("failed", "nothing", began, evidence + watched.lines()[-5:], reason)


def generate(client: Client, timeout: float) -> str:
    """Generate a few tokens and say so in one line. Raises NoAnswer or Rejected."""
    began = time.monotonic()
    request: dict[str, Any] = {
        "text": _PROMPT_TEXT,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    try:
        said = client.generate(request, timeout)
    except Rejected as error:
        # a server without a tokenizer takes token ids only
        if error.status != 400:
            raise
        del request["text"]
        said = client.generate({**request, "input_ids": _PROMPT_IDS}, timeout)
    count = (said.get("meta_info") or {}).get("completion_tokens") or len(said.get("output_ids") or [])
    if count != TOKENS:
        raise NoAnswer(f"{count} of {TOKENS} tokens came")
    return f"{count} tokens generated in {time.monotonic() - began:.2f} s"


def configuration(client: Client, threshold: int | None, timeout: float = 30.0) -> Gate:
    """Prove that the running server has the threshold: its arguments, each scheduler, and the worker."""
    began = time.monotonic()

    def end(outcome: str, proved: str, evidence: Sequence[str] = (), reason: str | None = None) -> Gate:
        return gate("configuration", outcome, proved, evidence, reason, time.monotonic() - began)

    try:
        info = client.info(timeout)
    except (NoAnswer, Rejected) as error:
        return end("failed", "nothing", reason=f"the server does not say how it is configured: {error}")
    if FIELD not in info:
        return end(
            "failed",
            "nothing",
            [f"version: {info.get('version')}"],
            f"the running server has no {FIELD}: it was started before the patch, or from other files",
        )
    states = [state for state in info.get("internal_states") or [] if isinstance(state, dict)]
    said = {"server": info[FIELD]}
    for rank, state in enumerate(states):
        said[f"scheduler {rank}"] = state.get(FIELD)
        counters = state.get(COUNTERS)
        if isinstance(counters, dict):
            said[f"worker {rank}"] = counters.get("threshold")
    evidence = [f"{who}: {FIELD}={value!r}" for who, value in said.items()]
    wanted = info[FIELD] if threshold is None else threshold
    wrong = [who for who, value in said.items() if value != wanted]
    if wrong:
        return end("failed", "nothing", evidence, f"{', '.join(wrong)}: not {wanted}")
    if wanted and not any(who.startswith("worker") for who in said):
        return end(
            "failed",
            "nothing",
            evidence,
            f"no worker reports {COUNTERS}: the one that runs does not know the threshold",
        )
    return end("passed", f"the running server (SGLang {info.get('version')}) has {FIELD}={wanted}", evidence)


def steps(info: dict[str, Any]) -> dict[str, int] | None:
    """Return the sum of the workers' counters, or None when no worker has any."""
    found = [
        state[COUNTERS]
        for state in info.get("internal_states") or []
        if isinstance(state.get(COUNTERS), dict)
    ]
    if not found:
        return None
    names = ("plain_steps", "speculative_steps", "switches")
    return {name: sum(int(one.get(name) or 0) for one in found) for name in names}


def _progress(client: Client, watched: Watched) -> tuple[object, ...]:
    """Return something that changes when the server works."""
    try:
        counted = steps(client.info(5.0))
    except (NoAnswer, Rejected):
        counted = None
    batches = sum(any(text in line for text in _BUSY) for line in watched.lines())
    return (counted and sorted(counted.items()), batches)


def _status(client: Client, timeout: float) -> int | None:
    try:
        return client.status("/health", timeout)
    except NoAnswer:
        return None


def _health_says(client: Client) -> str:
    status = _status(client, 5.0)
    return "nothing" if status is None else str(status)


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


def _gate(
    outcome: str, proved: str, began: float, evidence: Sequence[str] = (), reason: str | None = None
) -> Gate:
    return gate("health", outcome, proved, evidence, reason, time.monotonic() - began)
