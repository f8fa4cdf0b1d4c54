"""A closed-loop client: a fixed number of requests in flight, token ids in, token ids out."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.threshold.servers import request


@dataclass(frozen=True)
class Measurement:
    """What one burst of load gave. Times in seconds, throughput in generated tokens a second."""

    concurrency: int
    requests: int
    tokens: int
    seconds: float
    throughput: float
    latency_median: float
    accept_length: float | None


def generate(
    port: int, prompt: Sequence[int], new_tokens: int, timeout: float = 600, **extra: Any
) -> dict[str, Any]:
    """Generate greedily, exactly `new_tokens`, from token ids; `extra` goes into the request."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return request(
        port, "/generate", {"input_ids": list(prompt), "sampling_params": sampling, **extra}, timeout
    )


def prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """`count` reproducible random prompts; the first ids are left out, since they are special in most models."""
    source = random.Random(seed)
    return [[source.randrange(20, vocabulary) for _ in range(length)] for _ in range(count)]


def measure(
    port: int,
    concurrency: int,
    count: int,
    prompt_tokens: int,
    new_tokens: int,
    seed: int,
    vocabulary: int = 30000,
) -> Measurement:
    """Keep `concurrency` requests in flight until `count` are answered.

    Raises whatever the first failed request raised: a number from a run with failures would mean nothing.
    """
    waiting = prompts(count, prompt_tokens, vocabulary, seed)
    latencies: list[float] = []
    tokens = 0
    verifications = 0
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        nonlocal tokens, verifications
        while True:
            with lock:
                if not waiting or failures:
                    return
                prompt = waiting.pop()
            begin = time.perf_counter()
            try:
                meta = generate(port, prompt, new_tokens)["meta_info"]
            except BaseException as error:
                failures.append(error)
                return
            with lock:
                latencies.append(time.perf_counter() - begin)
                tokens += meta["completion_tokens"]
                verifications += meta.get("spec_verify_ct") or 0

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if failures:
        raise failures[0]
    return Measurement(
        concurrency=concurrency,
        requests=count,
        tokens=tokens,
        seconds=round(seconds, 4),
        throughput=round(tokens / seconds, 1),
        latency_median=round(sorted(latencies)[len(latencies) // 2], 4),
        accept_length=round(tokens / verifications, 3) if verifications else None,
    )
