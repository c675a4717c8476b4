"""Engine faults (F8-F11, F19), in a real server process with a faulty engine.

The batcher alone is tested in test_batcher_engines.py.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploykit.core.errors import Unsupported
from tests.support.serving.faults import (
    LIMIT_S,
    STAND_IN,
    Clients,
    Process,
    leaves_nothing,
    request,
    until,
)
from tests.support.serving.serve_faulty import DTYPE, FEWER, HANG, LOST, MEMORY, POISON, SHAPE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """For tests after which it serves as before."""
    with Process(tmp_path_factory.mktemp("engine"), env={"FAULT_ROWS": "8"}) as found:
        yield found


def infer_all(server: Process, *values: float) -> list[tuple[int, object]]:
    """One request per value: the first runs alone, the others as one batch."""
    with ThreadPoolExecutor(len(values)) as pool:
        server.hold()
        first = pool.submit(server.infer, values[0])
        until(server.in_engine)
        others = [pool.submit(server.infer, value) for value in values[1:]]
        until(lambda: server.gauge("deploykit_queue_depth") == len(others))
        server.release()
        return [each.result() for each in (first, *others)]


def test_f8_out_of_memory_at_load_exits_with_3(tmp_path: Path) -> None:
    found = subprocess.run(
        [*STAND_IN, "serve", "--engine", "m=x", "--http-port", "0", "--grpc-port=none"],
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


def test_f8_out_of_memory_in_a_batch_gets_503_and_the_next_succeeds(server: Process) -> None:
    status, headers, body = server.ask("POST", "/v2/models/m/infer", request(MEMORY))
    assert status == 503
    assert headers["retry-after"].isdigit()
    assert b"memory" in body
    assert server.infer(3) == (200, [7.0])
    assert server.status("/v2/health/ready") == 200


def test_f9_a_lost_gpu_ends_the_process_with_exit_code_3(tmp_path: Path) -> None:
    """A CUDA context does not recover: the supervisor has to restart the process."""
    with Process(tmp_path, env={"FAULT_ROWS": "2"}) as server:
        alone, *others = infer_all(server, 1, LOST, 2, 3, 4)
        assert alone == (200, [3.0])
        lost, *rest = [status for status, _ in others]  # which the server may read in any order
        assert lost == 503
        assert rest.count(503) >= 1  # in its batch, and in the queue
        assert set(rest) <= {200, 503}
        assert server.wait() == 3
        assert any("the GPU is lost" in line for line in server.log_lines())
        assert not any("Traceback" in line for line in server.log_lines())


def test_f10_a_hung_engine_gets_504_is_not_ready_and_can_be_stopped(tmp_path: Path) -> None:
    with Process(tmp_path, "--timeout-ms", "300") as server:
        until(lambda: server.infer(1) == (200, [3.0]))
        status, text = server.infer(HANG)
        assert status == 504, text
        assert server.infer(1)[0] == 504  # it is queued behind the hung request
        until(lambda: server.status("/v2/health/ready") == 503)
        assert server.status("/v2/models/m/ready") == 503
        assert server.status("/v2/health/live") == 200
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() in (0, 1)


@pytest.mark.parametrize("fault", [DTYPE, FEWER], ids=["dtype", "fewer rows"])
def test_f19_an_output_of_wrong_type_or_rows_gets_500_for_its_request_only(
    server: Process, fault: int
) -> None:
    values, lines = (1, 2, fault, 3, 4, 5), len(server.log_lines())
    for value, (status, found) in zip(values, infer_all(server, *values), strict=True):
        if value == fault:
            assert status == 500
            assert "the engine returned" in str(found)
        else:
            assert (status, found) == (200, [2.0 * value + 1])
    until(lambda: any("the engine returned" in line for line in server.log_lines()[lines:]))
    assert server.status("/v2/health/ready") == 200


def test_f19_an_output_of_another_shape_than_declared_is_answered_and_logged_once(
    server: Process,
) -> None:
    lines = len(server.log_lines())
    assert [server.infer(value)[0] for value in (SHAPE, 1, SHAPE)] == [200, 200, 200]
    until(lambda: any("as declared" in line for line in server.log_lines()[lines:]))
    assert sum("as declared" in line for line in server.log_lines()[lines:]) == 1


def test_hundreds_of_failed_requests_leak_nothing(server: Process) -> None:
    """File descriptors, threads and memory are as before, and the server still answers."""

    def fail() -> None:
        with Clients(server.port, 2) as clients:
            for fault in (POISON, DTYPE, FEWER, MEMORY) * 75:
                assert server.infer(fault)[0] in (500, 503)
            assert set(clients.stop()) <= {200, 503}  # 503: in one batch with MEMORY

    fail()  # one-time allocations
    leaves_nothing(server, fail, 3 << 20)
    assert server.infer(1) == (200, [3.0])
    assert not any("Traceback" in line for line in server.log_lines())
