"""The gate ``behaviour``: does the running server obey the threshold, and are its tokens right?

Requests run alone, at N, above N and alone again. The worker counts its steps; what it counted is held
against what was in flight. The tokens are held against the target model's own choice (serving_tokens.py) and,
if there is one, against a record of the server before the patch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .gates import Gate, gate
from .health import FIELD, Watched, steps
from .serving_client import Answer, Client, NoAnswer, Rejected
from .serving_tokens import NEAR_TIE, Verdict, divergence, judge

SWITCH = "Batch threshold: speculation"
LONG, SHORT = 96, 32
PROMPTS = 4
PROMPT_LENGTH = 8
# a step may be counted in the phase after the one that caused it: the scheduler works one step ahead
SLACK = 4


class Inconclusive(Exception):
    """The gate cannot tell; ``remedy`` says what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


class Broken(Exception):
    """The server does not do what the patch promises."""


@dataclass
class Phase:
    """What was sent, what came, and what the worker counted meanwhile."""

    name: str
    answers: list[Answer]
    plain: int
    speculative: int

    def together(self) -> int:
        """Return how many tokens each request got, at least, while all of them were in flight."""
        start = max(answer.arrivals[0] for answer in self.answers)
        end = min(answer.arrivals[-1] for answer in self.answers)
        return min(sum(start <= when <= end for when in answer.arrivals) for answer in self.answers)

    def __str__(self) -> str:
        return f"{self.name}: {self.plain} plain steps, {self.speculative} speculative"


@dataclass
class Trial:
    """One run of the gate: ``client``, what is expected, and what has been seen so far."""

    client: Client
    deadline: float
    near_tie: float = NEAR_TIE
    phases: list[Phase] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    traffic: bool = False

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.deadline

    def left(self) -> float:
        """Return the seconds left. Raises Inconclusive when there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise Inconclusive(
                f"not done after {self.deadline:.0f} s", "drain the server, or give a longer --deadline"
            )
        return left

    def counted(self) -> dict[str, int]:
        """Return the workers' counters, zeros when there are none."""
        return steps(self.client.info(self.left())) or {
            "plain_steps": 0,
            "speculative_steps": 0,
            "switches": 0,
        }

    def run(self, name: str, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Phase:
        """Send the prompts at once, and count."""
        before = self.counted()
        answers = self.client.load(prompts, lengths, self.left())
        after = self.counted()
        phase = Phase(
            name,
            answers,
            after["plain_steps"] - before["plain_steps"],
            after["speculative_steps"] - before["speculative_steps"],
        )
        # each step gives each request of its batch a token at least
        if phase.plain + phase.speculative > sum(lengths) + SLACK:
            self.traffic = True
        self.phases.append(phase)
        return phase

    def idle(self) -> None:
        """Note whether the server works for someone else now."""
        before = self.counted()
        time.sleep(0.5)
        if self.counted() != before:
            self.traffic = True


def behaviour(
    client: Client,
    watched: Watched,
    threshold: int | None,
    deadline: float,
    near_tie: float = NEAR_TIE,
    reference: str | None = None,
) -> Gate:
    """Prove that the server speculates up to the threshold and not above it, and that its tokens are right.

    ``threshold`` of None takes the one that the server says. ``deadline`` is in seconds, ``near_tie`` in
    nats. ``reference`` is a file that ``record`` wrote before the patch.
    """
    began = time.monotonic()
    trial = Trial(client, deadline, near_tie)
    logged = sum(SWITCH in line for line in watched.lines())
    try:
        proved = _try(trial, threshold, reference)
        outcome, reason = "passed", None
    except Inconclusive as error:
        outcome, proved, reason = "inconclusive", "nothing for sure", f"{error}; {error.remedy}"
    except (Broken, NoAnswer, Rejected) as error:
        outcome, proved, reason = "failed", "nothing", str(error)
        died = watched.death()
        if died:
            reason = f"the server died: {died}"
            trial.evidence += watched.cause()
    evidence = [str(phase) for phase in trial.phases] + trial.evidence
    switches = [line for line in watched.lines() if SWITCH in line][logged:]
    evidence += [f"journal: {line.strip()}" for line in switches[-4:]]
    return gate("behaviour", outcome, proved, evidence, reason, time.monotonic() - began)


def _try(trial: Trial, threshold: int | None, reference: str | None) -> str:
    info = trial.client.info(trial.left())
    said = info.get(FIELD)
    limit = said if threshold is None else threshold
    if limit is None or said != limit:
        raise Broken(f"the server says {FIELD}={said!r}, not {limit!r}")
    if limit and steps(info) is None:
        raise Broken("no worker counts its steps: the one that runs does not know the threshold")
    _need_room(info, limit)
    prompts = _prompts()
    trial.idle()

    alone = [trial.run("alone", [prompt], [LONG]) for prompt in prompts]
    if limit:
        at = trial.run(f"at {limit}", _cycle(prompts, limit), [SHORT] * limit)
        above = trial.run(f"above, {limit + 1}", _cycle(prompts, limit + 1), [LONG] + [SHORT] * limit)
    else:
        at = above = trial.run("4 at once", _cycle(prompts, 4), [SHORT] * 4)
    back = trial.run("alone again", prompts[:1], [LONG])
    trial.idle()

    _tokens(trial, alone, reference)
    if not limit:
        return "threshold 0: " + _never_plain(trial, trial.phases) + "; tokens right"
    _never_plain(trial, [*alone, at])
    _plain_above(trial, above, limit)
    _never_plain(trial, [back])
    _accepts_again(trial, alone[0], above)
    return (
        f"speculates alone and at {limit}, not above ({above.plain} plain steps at {limit + 1}), then again; "
        f"tokens right in {sum(len(phase.answers) for phase in trial.phases)} answers"
    )


def _need_room(info: dict[str, Any], limit: int) -> None:
    """Raise Inconclusive when the server cannot run more than ``limit`` requests at once."""
    state: dict[str, Any] = next(iter(info.get("internal_states") or []), {})
    running = state.get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    if running and running <= limit:
        raise Inconclusive(
            f"the server runs {running} requests at most, so its batch never exceeds {limit}",
            "lower the threshold, or raise --max-running-requests",
        )
    room = (state.get("memory_usage") or {}).get("token_capacity") or info.get("max_total_num_tokens")
    need = (limit + 1) * (PROMPT_LENGTH + SHORT + SLACK * 4) + LONG
    if room and room < need:
        raise Inconclusive(
            f"the KV cache holds {room} tokens, {limit + 1} requests need {need}",
            "lower the threshold, or give the server more memory (--mem-fraction-static)",
        )


def _prompts() -> list[list[int]]:
    """Return the prompts: token ids, which servers with and without a tokenizer take alike."""
    return [
        [10 + (7 * number + 3 * place * place) % 80 for place in range(PROMPT_LENGTH)]
        for number in range(PROMPTS)
    ]


def _cycle(prompts: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    return [prompts[number % len(prompts)] for number in range(count)]


def _never_plain(trial: Trial, phases: Iterable[Phase]) -> str:
    """Raise when a step was plain at or below the threshold, or when none was speculative."""
    for phase in phases:
        if phase.plain and trial.traffic:
            raise Inconclusive(
                f"{phase}: other requests may have kept the batch above the threshold",
                "drain the server, then probe again",
            )
        if phase.plain:
            raise Broken(f"{phase}: it must speculate there")
        if not phase.speculative and trial.phases[-1].name != "4 at once" and _counts(trial):
            raise Broken(f"{phase}: it does not speculate there")
    return "no step was plain"


def _counts(trial: Trial) -> bool:
    return steps(trial.client.info(trial.left())) is not None


def _plain_above(trial: Trial, above: Phase, limit: int) -> None:
    """Raise when the server went on speculating with more than ``limit`` requests in flight."""
    if above.plain:
        return
    together = above.together()
    if together < 2:
        raise Inconclusive(
            f"the {limit + 1} requests were never decoding at the same time",
            "lower the threshold, or look what holds requests back (prefill, KV cache)",
        )
    raise Broken(
        f"the server ignores the threshold: {limit + 1} requests decoded together for {together} steps or "
        f"more, {above.speculative} steps were speculative and none plain"
    )


def _accepts_again(trial: Trial, alone: Phase, above: Phase) -> None:
    """Raise when drafts are no longer accepted after plain steps: the draft's KV cache is broken."""
    before = (LONG - 1) / max(alone.speculative, 1)
    if not above.speculative:
        raise Broken(f"{above}: it does not speculate again when the batch has shrunk")
    after = (LONG - 1 - above.plain) / above.speculative
    trial.evidence.append(f"tokens a speculative step: {before:.2f} alone, {after:.2f} after plain steps")
    if before >= 1.5 and after < 1.05 and not trial.traffic:
        raise Broken(
            f"drafts are no longer accepted after plain steps: {after:.2f} tokens a step, {before:.2f} before"
        )


def _tokens(trial: Trial, alone: Sequence[Phase], reference: str | None) -> None:
    """Raise when an answer is not what the target model would choose."""
    judged: dict[tuple[int, ...], Verdict | None] = {}
    first = {tuple(phase.answers[0].prompt): phase.answers[0].tokens for phase in alone}
    differing = 0
    for phase in trial.phases:
        for answer in phase.answers:
            expected = first[tuple(answer.prompt)]
            place = divergence(answer.tokens, expected)
            if answer.tokens is not expected and place is None:
                continue
            differing += place is not None
            verdict = _judged(trial, judged, answer)
            if verdict and not verdict.right(trial.near_tie):
                raise Broken(f"wrong tokens, {phase.name}: {verdict}")
            if verdict is None and place is not None:
                raise Inconclusive(
                    f"{phase.name}: token {place} differs from the answer alone, and the server gives "
                    "no log-probabilities to judge by",
                    "compare with --reference",
                )
    worst = max((verdict.gap for verdict in judged.values() if verdict), default=None)
    trial.evidence.append(
        f"{sum(len(phase.answers) for phase in trial.phases)} answers, {differing} unlike the one alone, "
        + (
            "not judged: the server gives no log-probabilities"
            if worst is None
            else f"widest gap to the likeliest token {worst:.2f} nats (near tie: {trial.near_tie:g})"
        )
    )
    if reference:
        _like_reference(trial, judged, alone, reference)


def _judged(trial: Trial, judged: dict[tuple[int, ...], Verdict | None], answer: Answer) -> Verdict | None:
    key = (*answer.prompt, *answer.tokens)
    if key not in judged:
        try:
            judged[key] = judge(trial.client, answer.prompt, answer.tokens, trial.left())
        except Rejected:
            judged[key] = None
    return judged[key]


def _like_reference(
    trial: Trial, judged: dict[tuple[int, ...], Verdict | None], alone: Sequence[Phase], reference: str
) -> None:
    """Raise when the answers are not those of the server before the patch."""
    recorded = _read(reference)
    for phase in alone:
        answer = phase.answers[0]
        old = recorded.get(tuple(answer.prompt))
        if old is None:
            raise Inconclusive(
                f"{reference} was recorded with other prompts", "record it again, before the patch"
            )
        place = divergence(answer.tokens, old)
        if place is None:
            continue
        verdict = _judged(trial, judged, Answer(answer.prompt, list(old)))
        if verdict is None:
            raise Inconclusive(f"token {place} differs from the one before the patch", "look at both answers")
        if not verdict.right(trial.near_tie):
            raise Broken(
                f"the answers are not those from before the patch: token {place} was {old[place]}, is "
                f"{answer.tokens[place]}; of the old answer, {verdict}"
            )
    trial.evidence.append(f"like the {len(alone)} answers from before the patch")


def record(client: Client, deadline: float, path: str) -> Gate:
    """Write down this server's answers, for ``behaviour`` to compare with after the patch."""
    began = time.monotonic()
    try:
        trial = Trial(client, deadline)
        model = str(client.info(trial.left()).get("model_path"))
        answers = [client.load([prompt], [LONG], trial.left())[0] for prompt in _prompts()]
        text = json.dumps({"model": model, "answers": [[one.prompt, one.tokens] for one in answers]})
        fresh = Path(f"{path}.{os.getpid()}.new")
        fresh.write_text(text + "\n", encoding="utf-8")
        fresh.replace(path)
    except (NoAnswer, Rejected, Inconclusive, OSError) as error:
        return gate("record", "failed", "nothing", reason=str(error), seconds=time.monotonic() - began)
    proved = f"{len(answers)} answers of {LONG} tokens are in {path}"
    return gate("record", "passed", proved, seconds=time.monotonic() - began)


def _read(path: str) -> dict[tuple[int, ...], list[int]]:
    try:
        said = json.loads(Path(path).read_text(encoding="utf-8"))
        return {tuple(prompt): list(tokens) for prompt, tokens in said["answers"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Inconclusive(
            f"reference {path} cannot be read: {error}", "record it again, before the patch"
        ) from error
