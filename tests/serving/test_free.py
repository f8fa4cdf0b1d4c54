"""Is a port free, and who holds it?"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from specgate import serving, serving_ports, systemd


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as SGLang's web server does
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def test_a_free_port_passes() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    document = serving.wait(until="free", port=port, deadline=1)
    assert (document["outcome"], document["exit_code"]) == ("passed", 0)


def test_who_holds_it_is_named(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    document = serving.wait(until="free", port=port, deadline=0.1)
    assert document["exit_code"] == 1
    assert f"port {port} is taken by process {os.getpid()} (" in document["summary"]


def test_it_waits_until_the_port_is_free(taken: socket.socket) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        taken.close()

    document = serving.wait(until="free", port=taken.getsockname()[1], deadline=10, say=say)
    assert document["outcome"] == "passed"
    assert len(said) == 1


def test_a_connection_that_lingers_is_no_obstacle(taken: socket.socket) -> None:
    with socket.create_connection(taken.getsockname()) as client:
        served, _ = taken.accept()
        served.close()  # the server closes first: its side stays in TIME_WAIT
        port = taken.getsockname()[1]
        client.recv(1)
    taken.close()
    assert serving_ports.port_problem("127.0.0.1", port) is None


def test_an_address_of_another_host_is_refused() -> None:
    assert "cannot be used" in (serving_ports.port_problem("192.0.2.99", 1) or "")


def gpu_tool(folder: Path, pid: int) -> None:
    """Write an nvidia-smi for a machine without GPUs: two of them, the second in use."""
    tool = folder / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "--query-gpu=*) printf '0, GPU-aaa\\n1, GPU-bbb\\n';;\n"
        f"*) printf 'GPU-bbb, {pid}\\n';;\nesac\n"
    )
    tool.chmod(0o755)


@pytest.mark.parametrize(("gpus", "held"), [("0", False), ("1", True), ("GPU-bbb", True), ("0,1", True)])
def test_a_gpu_that_someone_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, held: bool
) -> None:
    gpu_tool(tmp_path, os.getpid())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    problem = serving_ports.gpu_problem(gpus.split(","), "sglang@main.service")
    assert (problem is not None) is held
    assert not held or f"process {os.getpid()}" in str(problem)


def test_without_gpus_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert serving_ports.gpu_problem(["0"], None) is None


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    before = systemd.start_time(child.pid)
    assert before and before == systemd.start_time(child.pid)
    child.kill()
    child.wait()
    assert systemd.start_time(child.pid) is None


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert systemd.start_time(child.pid) is None
    child.wait()
