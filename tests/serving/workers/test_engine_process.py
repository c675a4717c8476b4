"""`serve --workers shared:2`: two processes for the clients, one for the engines of both."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.serving.faults import (
    BROKEN,
    REAL,
    Clients,
    Process,
    request,
    until,
)
from tests.support.serving.reloading import model, replace
from tests.support.serving.serve_faulty import HANG, POISON
from tests.support.serving.worker_processes import (
    MANY,
    ask,
    connections,
    kill,
    workers,
)

SHARED = ("--workers", "shared:2")
STEPS = """
import numpy as np

add = {"model": "add.onnx", "x": "rows"}


def rows(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32).reshape(1, 4)


def answer(add: np.ndarray) -> list[float]:
    return add.reshape(-1).tolist()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("shared")
    options = (*SHARED, "--grpc-port", "0", "--timeout-ms", "60000")
    with Process(folder, *options) as found:
        yield found


def engines(server: Process) -> int:
    """The pid of the process that runs them: the only one that no client is connected to."""

    names = "memfd:deploykit"
    counts = {pid: Path(f"/proc/{pid}/maps").read_text().count(names) for pid in workers(server)}
    return max(counts, key=counts.__getitem__)


def test_any_process_has_the_figures_of_all_and_engines_are_counted_once(server: Process) -> None:
    before = server.gauge("nv_inference_count")
    with connections(server) as clients:
        for number, client in enumerate(clients):
            status, found = ask(client, "POST", "/v2/models/m/infer", request(number))
            assert (status, found["outputs"][0]["data"][0]) == (200, 2 * number + 1)
        for client in clients[:8]:
            (stats,) = ask(client, "GET", "/v2/models/m/stats")[1]["model_stats"]
            assert stats["inference_count"] == before + MANY
            (figures,) = ask(client, "GET", "/status")[1]["models"]
            assert (figures["rows"], figures["engines"], figures["queue"]) == (
                before + MANY,
                1,
                1024,
            )
            (group,) = ask(client, "GET", "/v2/models/m/config")[1]["instance_group"]
            assert group["count"] == 1
    assert server.gauge("nv_inference_count") == before + MANY
    assert server.gauge("deploykit_workers") == 2
    assert server.gauge("deploykit_engines") == server.gauge("deploykit_model_info") == 1
    assert server.gauge("deploykit_requests_in_flight") == 0


def test_an_error_of_the_engine_reaches_the_client_and_the_metrics(server: Process) -> None:
    before = server.gauge("nv_inference_request_failure")
    status, error = server.infer(POISON)
    assert (status, "the engine failed" in error) == (500, True)
    assert server.gauge("nv_inference_request_failure") == before + 1


def test_grpc_streams_answers_too(server: Process) -> None:
    from tritonclient import grpc

    found: list[float] = []
    for number in range(8):
        with grpc.InferenceServerClient(server.grpc) as client:
            item = grpc.InferInput("x", [1, 4], "FP32")
            item.set_data_from_numpy(np.full((1, 4), number, np.float32))
            client.start_stream(lambda result, error: found.append(result.as_numpy("y")[0, 0]))  # noqa: ARG005
            client.async_stream_infer("m", [item])
            client.stop_stream()
    assert found == [2.0 * number + 1 for number in range(8)]


@pytest.mark.parametrize("count", ["2", "shared:2"])
def test_tls_and_pipelines_are_with_the_workers_and_count_for_all(
    tmp_path: Path, pem: tuple[Path, Path], count: str
) -> None:
    from tritonclient import grpc

    model(tmp_path / "add.onnx", 1.0)
    steps = tmp_path / "steps.py"
    steps.write_text(STEPS)
    cert, key = pem
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--grpc-port", "0")
    engine = f"m={tmp_path / 'add.onnx'}"
    with Process(
        tmp_path, "--workers", count, *options, "--pipeline", str(steps), command=REAL,
        engine=engine,
    ) as server:  # fmt: skip
        trusted = ssl.create_default_context(cafile=str(cert))
        port = server.grpc.rpartition(":")[2]
        for number in range(4):
            client = http.client.HTTPSConnection("localhost", server.port, context=trusted)
            body = json.dumps([number, 0, 0, 0]).encode()
            status, found = ask(client, "POST", "/v2/models/steps/predict", body)
            assert (status, found) == (200, [number + 1.0, 1.0, 1.0, 1.0])
            status, found = ask(client, "GET", "/status")
            assert [each["queue"] for each in found["models"]] == [1024, 1024]
            (stats,) = ask(client, "GET", "/v2/models/steps/stats")[1]["model_stats"]
            assert stats["inference_stats"]["success"]["count"] == 2 * number + 1
            stages = {
                n: each["compute_infer"]["count"] for n, each in stats["response_stats"].items()
            }
            assert stages == dict.fromkeys(["values", "rows", "add", "answer"], 2 * number + 1)
            client.close()
            with grpc.InferenceServerClient(
                f"localhost:{port}", ssl=True, root_certificates=str(cert)
            ) as secured:
                item = grpc.InferInput("x", [1, 4], "FP32")
                item.set_data_from_numpy(np.full((1, 4), number, np.float32))
                assert secured.infer("m", [item]).as_numpy("y")[0, 0] == number + 1
                given = grpc.InferInput("values", [1], "BYTES")
                given.set_data_from_numpy(np.array([body], object))
                (answer,) = secured.infer("steps", [given]).as_numpy("answer")
                assert json.loads(answer) == [number + 1.0, 1.0, 1.0, 1.0]


def test_requests_to_both_processes_run_as_one_batch(tmp_path: Path) -> None:
    """The queue waits for as many rows as there are connections, which both processes have."""
    options = ("--max-batch", str(MANY), "--max-delay-us", "50000000", "--timeout-ms", "60000")
    with Process(tmp_path, *SHARED, *options) as server, connections(server) as clients:
        for number, client in enumerate(clients):
            client.request("POST", "/v2/models/m/infer", request(number))
        for number, client in enumerate(clients):
            found = json.loads(client.getresponse().read())
            assert found["outputs"][0]["data"][0] == 2 * number + 1
        (stats,) = ask(clients[0], "GET", "/v2/models/m/stats")[1]["model_stats"]
        assert (stats["execution_count"], stats["inference_count"]) == (1, MANY)


def test_without_its_engines_the_server_answers_503_until_others_run(tmp_path: Path) -> None:
    with Process(tmp_path, *SHARED, env={"FAULT_LATENCY_S": "0.002"}) as server:
        victim, fronts = engines(server), set(workers(server))
        fronts.remove(victim)
        with Clients(server.port, 12) as clients:
            until(lambda: len(clients.outcomes) > 100)
            kill(server, victim)
            until(lambda: server.status("/v2/health/ready") == 200)
            seen = len(clients.outcomes)
            until(lambda: len(clients.outcomes) > seen + 100)
            counts = clients.stop()
        assert counts.keys() == {200, 503}  # no connection broke
        assert fronts < set(workers(server))
        assert server.gauge("deploykit_worker_restarts_total") == 1
        assert any("the process of the engines was ended" in line for line in server.log_lines())
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_killed_front_end_loses_its_own_connections_alone(tmp_path: Path) -> None:
    with Process(tmp_path, *SHARED, env={"FAULT_LATENCY_S": "0.002"}) as server:
        stays = engines(server)
        victim = next(pid for pid in workers(server) if pid != stays)
        with Clients(server.port, 12) as clients:
            until(lambda: len(clients.outcomes) > 100)
            kill(server, victim)
            until(lambda: len(workers(server)) == 3 and server.gauge("deploykit_workers") == 2)
            seen = len(clients.outcomes)
            until(lambda: len(clients.outcomes) > seen + 100)
            counts = clients.stop()
        assert counts.keys() <= {200, BROKEN}
        assert engines(server) == stays
        until(lambda: server.gauge("deploykit_requests_in_flight") == 0)  # also of the dead one


def test_a_stopped_process_of_the_engines_costs_504_and_goes_on(tmp_path: Path) -> None:
    env = {"FAULT_MISSED": "1000"}  # nor is it replaced, however long this takes
    with Process(tmp_path, *SHARED, "--timeout-ms", "200", env=env) as server:
        stopped = engines(server)
        os.kill(stopped, signal.SIGSTOP)
        status, error = server.infer(1)
        assert (status, "past its time limit" in error) == (504, True)
        os.kill(stopped, signal.SIGCONT)
        until(lambda: server.infer(1)[0] == 200)
        assert stopped in workers(server)


def test_memory_that_hanging_requests_fill_refuses_more(tmp_path: Path) -> None:
    env = {"FAULT_SHARE_BYTES": "0", "FAULT_WIDTH": "256"}
    options = ("--workers", "shared:1", "--max-body-bytes", "8192", "--timeout-ms", "60000")
    with Process(tmp_path, *options, env=env) as server, connections(server, 9) as clients:
        for client in clients:
            client.request("POST", "/v2/models/m/infer", request(HANG, width=256))
        sockets = {client.sock: client for client in clients}
        (refused,) = until(lambda: select.select(sockets, [], [], 0)[0])
        reply = sockets[refused].getresponse()
        assert reply.status == 503
        assert "the memory shared with the process of the engines is full" in str(reply.read())
        assert server.status("/v2/health/live") == 200


def test_a_replaced_file_is_in_use_everywhere(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", 1.0)
    with Process(tmp_path, *SHARED, command=REAL, engine=f"m={path}") as server:
        replace(model(tmp_path / "new.onnx", 2.0), path)
        until(lambda: server.gauge("deploykit_model_generation") == 2)
        assert server.infer(1) == (200, [3.0])

        def generations() -> set[str]:
            with connections(server) as clients:
                found = [ask(client, "GET", "/v2/models/m")[1]["parameters"] for client in clients]
            return {each["generation"] for each in found}

        until(lambda: generations() == {"2"})


def test_front_ends_of_another_model_are_replaced_when_its_engines_are(tmp_path: Path) -> None:
    """The running engines refuse such a file; those that start after them do not know."""
    path = model(tmp_path / "m.onnx", 1.0)
    with Process(tmp_path, *SHARED, "--no-reload", command=REAL, engine=f"m={path}") as server:
        replace(model(tmp_path / "new.onnx", 2.0, width=3), path)
        kill(server, engines(server))

        def answers() -> int:
            try:
                return server.ask("POST", "/v2/models/m/infer", request(1, width=3))[0]
            except (OSError, http.client.HTTPException):  # one that ends
                return BROKEN

        until(lambda: {answers() for _ in range(MANY)} == {200})
