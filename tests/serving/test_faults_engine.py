"""Faults of the engine (F8-F11, F19): in the real server process, with a stand-in that has them.

What the batcher alone answers to each is in test_batcher_engines.py.
"""

from __future__ import annotations

import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploykit.core.errors import Unsupported
from tests.support.serving.faults import (
    BROKEN,
    LIMIT_S,
    REFUSED,
    STAND_IN,
    Clients,
    Process,
    request,
    until,
)
from tests.support.serving.serve_faulty import DTYPE, FEWER, HANG, LOST, MEMORY, POISON, SHAPE

BATCHED = {"FAULT_LATENCY_S": "0.05", "FAULT_ROWS": "8"}


def together(server: Process, *values: float) -> list[tuple[int, object]]:
    """Ask for each value in a request of its own, all at once."""
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(server.infer, values))


def test_f8_out_of_memory_at_load_is_exit_3(tmp_path: Path) -> None:
    found = subprocess.run(
        [*STAND_IN, "serve", "--engine", "m=x", "--http-port", "0", "--no-grpc"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "FAULT_LOAD": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == Unsupported.exit_code == 3
    assert found.stdout == ""
    assert "9.0 GiB needed, 1.0 GiB free" in found.stderr
    assert "Traceback" not in found.stderr


def test_f8_out_of_memory_in_a_run_is_503_and_the_next_batch_is_right(tmp_path: Path) -> None:
    with Process(tmp_path) as server:
        status, headers, body = server.ask("POST", "/v2/models/m/infer", request(MEMORY))
        assert status == 503
        assert headers["retry-after"].isdigit()
        assert b"memory" in body
        assert server.infer(3) == (200, [7.0])
        assert server.status("/v2/health/ready") == 200


def test_f9_a_lost_gpu_ends_the_process_for_its_supervisor(tmp_path: Path) -> None:
    """A CUDA context does not recover: whoever stays up answers errors for ever."""
    with Process(tmp_path, env=BATCHED) as server, Clients(server.port, 8) as clients:
        until(lambda: len(clients.outcomes) > 16)
        assert server.infer(LOST)[0] == 503
        assert server.wait() == 3
        counts = clients.stop()  # each 200 was right
        assert counts.keys() <= {200, 503, REFUSED, BROKEN}
        assert counts[503] > 0
        assert any("the GPU is lost" in line for line in server.said())
        assert not any("Traceback" in line for line in server.said())


def test_f10_a_hung_engine_costs_504_and_readiness_but_not_the_end(tmp_path: Path) -> None:
    with Process(tmp_path, "--timeout-ms", "300") as server:
        assert server.infer(1) == (200, [3.0])
        status, text = server.infer(HANG)
        assert status == 504, text
        assert server.infer(1)[0] == 504  # it waits behind
        until(lambda: server.status("/v2/health/ready") == 503)
        assert server.status("/v2/models/m/ready") == 503
        assert server.status("/v2/health/live") == 200
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() in (0, 1)


def test_f11_a_poisoned_row_fails_alone(tmp_path: Path) -> None:
    with Process(tmp_path, env=BATCHED) as server:
        values = (1, 2, POISON, 3, 4, 5, 6, 7)
        answers = together(server, *values)  # the first runs alone, the others wait and are joined
        for value, (status, found) in zip(values, answers, strict=True):
            if value == POISON:
                assert status == 500
                assert "/host/path" not in str(found)
                assert "0xdeadbeef" not in str(found)
            else:
                assert (status, found) == (200, [2.0 * value + 1])
        assert server.infer(8) == (200, [17.0])


@pytest.mark.parametrize("fault", [SHAPE, DTYPE, FEWER], ids=["shape", "dtype", "fewer rows"])
def test_f19_a_wrong_answer_is_500_and_nobodys_row(tmp_path: Path, fault: int) -> None:
    with Process(tmp_path, env=BATCHED) as server:
        values = (1, 2, fault, 3, 4, 5)
        for value, (status, found) in zip(values, together(server, *values), strict=True):
            if value == fault:
                assert status == 500
                assert "the engine returned" in str(found)
            else:
                assert (status, found) == (200, [2.0 * value + 1])
        assert any("the engine returned" in line for line in server.said())
        assert server.status("/v2/health/ready") == 200


def test_faults_do_not_add_up(tmp_path: Path) -> None:
    """A thousand bad rows later the server holds what it held, and answers as before."""
    faults = (POISON, SHAPE, DTYPE, FEWER, MEMORY)
    with Process(tmp_path) as server:
        for rounds in (50, 200):  # first for what is made once
            held, rss = server.holds(), server.rss_bytes()
            with Clients(server.port, 2) as clients:
                for _ in range(rounds):
                    for fault in faults:
                        assert server.infer(fault)[0] in (500, 503)
                assert set(clients.stop()) <= {200, 503}  # 503: in one batch with MEMORY
        until(lambda: server.holds()[0] <= held[0])
        assert server.holds()[1] == held[1]
        assert server.rss_bytes() - rss < 8 << 20
        assert server.infer(1) == (200, [3.0])
        assert not any("Traceback" in line for line in server.said())
