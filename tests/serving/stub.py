"""A server that speaks SGLang's interface and misbehaves on request.

For what a real SGLang cannot be brought to on purpose. What a healthy one does, and the two bad builds that matter
most, are tested with the real one (tests/ansible/test_rollout_live.py).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 97


def likeliest(tokens: list[int]) -> int:
    """The model: what follows is a function of the last two tokens."""
    return (tokens[-1] * 5 + tokens[-2] * 3 + 1) % VOCABULARY


@dataclass
class Stub:
    """How the server behaves. ``accepts`` is how many tokens a speculative step gives."""

    threshold: int = 2
    obeys: bool = True
    resumes: bool = True
    accepts: int = 1
    accepts_after_plain: int | None = None
    wrong_plain: bool = False
    wrong_always: bool = False
    tie: float | None = None  # a wrong token is that close to the likeliest, in nats
    logprobs: bool = True
    counters: bool = True
    running: int = 48
    capacity: int = 100000
    health: int = 200
    generates: bool = True
    key: str | None = None
    tokenizer: bool = True
    traffic: float = 0.0  # steps a second for somebody else
    plain: int = 0
    speculative: int = 0
    switched: bool = False
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def info(self) -> dict[str, Any]:
        extra = int((time.monotonic() - self.began) * self.traffic)
        state: dict[str, Any] = {
            "speculative_disable_batch_threshold": self.threshold,
            "effective_max_running_requests_per_dp": self.running,
            "memory_usage": {"token_capacity": self.capacity},
        }
        if self.counters:
            state["batch_threshold"] = {
                "threshold": self.threshold,
                "plain_steps": self.plain + extra,
                "speculative_steps": self.speculative,
                "switches": 0,
            }
        return {
            "version": "0.0.0",
            "model_path": "stub",
            "speculative_disable_batch_threshold": self.threshold,
            "internal_states": [state],
        }

    def serve(self, prompts: list[list[int]], lengths: list[int]) -> Iterator[dict[str, Any]]:
        """Decode a batch step by step, as the scheduler would."""
        rows = [list(prompt) for prompt in prompts]
        made = [0] * len(rows)
        first = True
        after_plain = False
        while any(done < wanted for done, wanted in zip(made, lengths, strict=True)):
            alive = [n for n in range(len(rows)) if made[n] < lengths[n]]
            plain = self.obeys and self.threshold and len(alive) > self.threshold
            plain = bool(plain or (self.switched and not self.resumes))
            self.switched = self.switched or plain
            after_plain = after_plain or plain
            several = self.accepts
            if after_plain and self.accepts_after_plain is not None:
                several = self.accepts_after_plain
            if not first:
                with self.lock:
                    self.plain, self.speculative = self.plain + plain, self.speculative + (not plain)
            for n in alive:
                for _ in range(1 if plain or first else min(several, lengths[n] - made[n])):
                    token = likeliest(rows[n])
                    wrong = self.wrong_always or (self.wrong_plain and plain)
                    rows[n].append((token + 1) % VOCABULARY if wrong and made[n] % 5 == 3 else token)
                    made[n] += 1
                yield {
                    "index": n,
                    "output_ids": rows[n][len(prompts[n]) :],
                    "meta_info": {"completion_tokens": made[n]},
                }
            first = False

    def score(self, tokens: list[int], start: int) -> dict[str, Any]:
        """How likely each token from ``start`` was, and which one was likeliest."""
        chosen: list[Any] = [[None, tokens[start], None]]
        best: list[Any] = [None]
        for place in range(start + 1, len(tokens)):
            top = likeliest(tokens[:place])
            gap = 0.0 if tokens[place] == top else (5.0 if self.tie is None else self.tie)
            chosen.append([-0.1 - gap, tokens[place], None])
            best.append([[-0.1, top, None]])
        return {"input_token_logprobs": chosen, "input_top_logprobs": best, "completion_tokens": 1}


@contextmanager
def running(stub: Stub) -> Iterator[str]:
    """Serve, and give the URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def refused(self) -> bool:
            if stub.key and self.headers["Authorization"] != f"Bearer {stub.key}":
                self.send(401, {"error": "Unauthorized"})
                return True
            return False

        def send(self, status: int, said: Any) -> None:
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path.startswith("/health"):
                self.send(stub.health, {})
            elif not self.refused():
                self.send(200, stub.info())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.refused():
                return
            if not stub.generates:
                threading.Event().wait(60)  # the port is open, and nothing comes
            if "text" in asked and not stub.tokenizer:
                self.send(400, {"error": {"message": "skip_tokenizer_init=True cannot accept text prompts"}})
            elif asked.get("return_logprob"):
                tokens = asked["input_ids"]
                if stub.logprobs:
                    self.send(200, {"meta_info": stub.score(tokens, asked["logprob_start_len"])})
                else:
                    self.send(400, {"error": {"message": "no logprob"}})
            elif asked.get("stream"):
                self.send_response(200)
                self.end_headers()
                lengths = [one["max_new_tokens"] for one in asked["sampling_params"]]
                for event in stub.serve(asked["input_ids"], lengths):
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                count = asked["sampling_params"]["max_new_tokens"]
                self.send(200, {"output_ids": [1] * count, "meta_info": {"completion_tokens": count}})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
