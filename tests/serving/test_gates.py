"""The gates on a running server: what they must not be fooled by, and when they cannot tell."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from specgate import serving
from specgate.cli import main

from tests.serving.stub import Stub, running


def probe(stub: Stub, *gates: str, **options: Any) -> dict[str, Any]:
    with running(stub) as url:
        return serving.probe(gates, url, **{"deadline": 20, **options})


def reason(document: dict[str, Any]) -> str:
    return str(document["gates"][-1]["reason"])


# health


def test_tokens_are_health() -> None:
    document = probe(Stub(), "health")
    assert (document["outcome"], document["exit_code"]) == ("passed", 0)


def test_a_200_from_health_does_not_hide_dead_generation() -> None:
    document = probe(Stub(generates=False), "health", deadline=1)
    assert document["exit_code"] == 1
    assert document["gates"][0]["evidence"][0] == "/health says 200, which is not true"


def test_a_503_from_health_is_no_failure_while_tokens_come() -> None:
    document = probe(Stub(health=503), "health")
    assert document["outcome"] == "passed"
    assert "503" in document["gates"][0]["proved"]


def test_a_server_that_works_for_others_is_busy_not_dead() -> None:
    document = probe(Stub(generates=False, traffic=50), "health", deadline=1)
    assert document["exit_code"] == 4
    assert document["remedy"]


def test_a_port_that_is_open_and_says_nothing_fails_within_the_deadline() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        began = time.monotonic()
        document = serving.probe(["health"], f"http://127.0.0.1:{server.getsockname()[1]}", deadline=1)
    assert document["exit_code"] == 1
    assert "port is open" in reason(document)
    assert time.monotonic() - began < 60


def test_nothing_listens() -> None:
    document = serving.probe(["health"], "http://127.0.0.1:1", deadline=0.1)
    assert "nothing listens" in reason(document)


def test_a_server_without_a_tokenizer_gets_token_ids() -> None:
    assert probe(Stub(tokenizer=False), "health")["outcome"] == "passed"


def test_the_api_key_comes_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    passed = probe(Stub(key="s3cret"), "health", "configuration", "behaviour", api_key_file=str(key))
    assert passed["outcome"] == "passed"
    key.write_text("other-s3cret")
    refused = probe(Stub(key="s3cret"), "health", api_key_file=str(key))
    assert refused["exit_code"] == 4
    assert "s3cret" not in json.dumps([passed, refused])


def test_a_missing_key_file_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    assert probe(Stub(), "health", api_key_file=str(tmp_path / "none"))["exit_code"] == 2


def test_a_proxy_in_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert probe(Stub(), "health")["outcome"] == "passed"


# waiting


def test_waiting_ends_when_it_serves() -> None:
    said: list[str] = []
    with running(Stub()) as url:
        assert serving.wait(url=url, deadline=10, say=said.append)["outcome"] == "passed"


def test_waiting_needs_health_as_well_as_tokens() -> None:
    stub = Stub(health=503)
    timer = threading.Timer(2, lambda: setattr(stub, "health", 200))
    timer.start()
    began = time.monotonic()
    with running(stub) as url:
        assert serving.wait(url=url, deadline=20)["outcome"] == "passed"
    assert time.monotonic() - began > 2


def test_waiting_ends_at_once_when_the_process_dies() -> None:
    child = subprocess.Popen(["sleep", "2"])
    reaper = threading.Thread(target=child.wait)
    reaper.start()
    began = time.monotonic()
    document = serving.wait(url="http://127.0.0.1:1", pid=child.pid, deadline=60)
    assert document["exit_code"] == 1
    assert f"process {child.pid} has ended" in reason(document)
    assert time.monotonic() - began < 30
    reaper.join()


def test_waiting_ends_at_once_when_the_process_died_before() -> None:
    """systemd starts the wait after the server, which may not have lived that long."""
    child = subprocess.Popen(["true"])
    child.wait()
    began = time.monotonic()
    document = serving.wait(url="http://127.0.0.1:1", pid=child.pid, deadline=60)
    assert document["exit_code"] == 1 and time.monotonic() - began < 10
    assert "has ended" in reason(document)


# configuration


def test_the_threshold_that_is_expected() -> None:
    assert probe(Stub(), "configuration", threshold=2)["outcome"] == "passed"
    document = probe(Stub(), "configuration", threshold=3)
    assert document["exit_code"] == 1
    assert "server" in reason(document) and "not 3" in reason(document)


def test_a_worker_that_does_not_know_the_threshold() -> None:
    assert "does not know the threshold" in reason(probe(Stub(counters=False), "configuration"))


def test_gates_end_at_the_first_that_does_not_pass() -> None:
    document = probe(Stub(counters=False), "health", "configuration", "behaviour")
    assert [gate["gate"] for gate in document["gates"]] == ["health", "configuration"]


# behaviour


@pytest.mark.parametrize("accepts", [1, 3])
@pytest.mark.parametrize("threshold", [1, 2, 16])
def test_a_server_that_obeys(threshold: int, accepts: int) -> None:
    document = probe(Stub(threshold=threshold, accepts=accepts), "behaviour")
    assert document["outcome"] == "passed", document


def test_threshold_0_always_speculates() -> None:
    assert probe(Stub(threshold=0, counters=False), "behaviour")["outcome"] == "passed"


@pytest.mark.parametrize(
    ("stub", "code", "said"),
    [
        (Stub(obeys=False), 1, "ignores the threshold"),
        (Stub(resumes=False), 1, "it must speculate there"),
        (Stub(counters=False), 1, "does not know the threshold"),
        (Stub(wrong_plain=True), 1, "wrong tokens, above"),
        (Stub(wrong_always=True), 1, "wrong tokens, alone"),
        (Stub(accepts=3, accepts_after_plain=1), 1, "no longer accepted"),
        (Stub(wrong_plain=True, tie=0.1), 0, "None"),
        (Stub(wrong_plain=True, logprobs=False), 4, "log-probabilities"),
        (Stub(running=2), 4, "--max-running-requests"),
        (Stub(capacity=100), 4, "KV cache"),
        (Stub(traffic=5000), 4, "drain the server"),
    ],
)
def test_what_it_finds(stub: Stub, code: int, said: str) -> None:
    document = probe(stub, "behaviour")
    assert document["exit_code"] == code, document
    assert said in reason(document)


def test_the_threshold_must_be_the_expected_one() -> None:
    assert "not 5" in reason(probe(Stub(), "behaviour", threshold=5))


def test_a_deadline_is_kept() -> None:
    began = time.monotonic()
    document = probe(Stub(), "behaviour", deadline=0.05)
    assert document["exit_code"] == 4
    assert time.monotonic() - began < 10


# the record of the server before the patch


def test_answers_from_before_the_patch_are_compared(tmp_path: Path) -> None:
    record = str(tmp_path / "before.json")
    assert probe(Stub(), "record", reference=record)["outcome"] == "passed"
    document = probe(Stub(), "behaviour", reference=record)
    assert "like the 4 answers from before the patch" in document["gates"][0]["evidence"]


def test_a_build_that_answers_otherwise_than_before_is_caught(tmp_path: Path) -> None:
    """The new build agrees with itself: only the record can tell."""
    record = str(tmp_path / "before.json")
    probe(Stub(wrong_always=True), "record", reference=record)
    document = probe(Stub(), "behaviour", reference=record)
    assert document["exit_code"] == 1
    assert "not those from before the patch" in reason(document)


def test_a_damaged_record_is_inconclusive(tmp_path: Path) -> None:
    record = tmp_path / "before.json"
    record.write_text("{")
    assert probe(Stub(), "behaviour", reference=str(record))["exit_code"] == 4


# the command line


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with running(Stub()) as url:
        assert main(["probe", "health", "configuration", "--url", url, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["operation"] == "probe"
        assert [gate["outcome"] for gate in document["gates"]] == ["passed", "passed"]
        assert main(["probe", "configuration", "--url", url, "--threshold", "9"]) == 1
        assert "FAIL configuration" in capsys.readouterr().out
    assert main(["wait", "--url", "http://127.0.0.1:1", "--deadline", "0.1"]) == 1
