"""Front ends and the process of the engines, connected within one process: no request is lost."""

from __future__ import annotations

import asyncio
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

from deploykit.core.errors import BadInput, DeploykitError, Expired, Overloaded
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.batching.queue import BatchRun, Pending, Watcher
from deploykit.serving.batching.runner import EngineFailed
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers.front import RemoteEngine
from tests.support.serving.faults import (
    BROKEN,
    REAL,
    Clients,
    Process,
    request,
    until,
)
from tests.support.serving.linked import Linked, linked, values
from tests.support.serving.reloading import model, replace
from tests.support.serving.serve_faulty import HANG, POISON
from tests.support.serving.worker_processes import (
    MANY,
    ask,
    connections,
    kill,
    workers,
)


def test_strings_and_any_length_come_back_to_the_front_end_that_asked() -> None:
    async def test(found: Linked) -> None:
        asked = [
            (found.ask(n % 2, [float(n)] * (n % 3 + 1), f"wörd {n}", model="ab"[n % 2])[1], n)
            for n in range(60)
        ]
        for answered, n in asked:
            assert values(await answered) == (f"wörd {n}"[::-1], [n + 1.0] * (n % 3 + 1))

    linked(test)


def test_requests_of_two_front_ends_run_as_one_batch() -> None:
    """The queue waits for eight rows: neither front end has so many."""

    async def test(found: Linked) -> None:
        asked = [found.ask(n % 2, [1.0])[1] for n in range(8)]
        for answered in asked:
            assert values(await answered) == ("ba", [2.0])
        assert found.engines["a"].batches == [8]

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_an_error_of_the_engine_stays_what_it_is() -> None:
    async def test(found: Linked) -> None:
        failed = (await found.ask(0, [-1.0])[1]).error
        assert isinstance(failed, EngineFailed)
        assert "the engine failed on this request" in failed.message

    linked(test)


def test_the_queue_of_all_front_ends_is_one_and_bounded() -> None:
    async def test(found: Linked) -> None:
        held = [found.ask(n % 2, [1.0])[1] for n in range(2)]
        while found.repository.find("a").waiting < 2:
            await asyncio.sleep(0)
        refused = (await found.ask(1, [1.0])[1]).error
        assert isinstance(refused, Overloaded)
        assert "the queue of model 'a' is full (2 requests)" in refused.message
        found.repository.close()  # answers what waits
        assert [values(await each) for each in held] == [("ba", [2.0])] * 2

    linked(test, ServeOptions(queue=2, max_batch=8, max_delay_us=60_000_000))


def test_a_request_past_its_deadline_is_answered_though_it_waits() -> None:
    async def test(found: Linked) -> None:
        _, answered = found.ask(0, [1.0], timeout_us=1)
        while not answered.done():
            found.repository.expire()
            await asyncio.sleep(0.001)
        assert isinstance((await answered).error, Expired)

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_a_cancelled_request_leaves_the_queue_and_its_memory() -> None:
    async def test(found: Linked) -> None:
        pending, answered = found.ask(0, [1.0])
        model, queue = found.served[0].find("a"), found.repository.find("a")
        while not queue.waiting:
            await asyncio.sleep(0)
        assert model.cancel(pending)
        assert not model.cancel(pending)
        while queue.waiting or found.links[0].connection._open:
            await asyncio.sleep(0)
        assert not answered.done()
        assert queue.metrics.status()["outcomes"]["cancelled"] == 1
        asked = [found.ask(0, [1.0])[1] for _ in range(8)]  # the blocks are free again
        assert values(await asked[0]) == ("ba", [2.0])

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_memory_that_is_full_refuses_and_serves_again() -> None:
    async def test(found: Linked) -> None:
        held, refused = [], []
        for _ in range(50):
            try:
                held.append(found.ask(0, [1.0] * 100))
            except Overloaded as exc:
                refused.append(exc.message)
        assert len(held) > 3
        assert set(refused) == {"the memory shared with the process of the engines is full"}
        assert found.served[0].find("a").metrics.status()["outcomes"]["rejected"] == len(refused)
        found.ask(1, [1.0] * 100)  # the other one has its own
        for pending, _ in held:
            found.served[0].find("a").cancel(pending)
        while found.links[0].connection._open:
            await asyncio.sleep(0)
        assert len([found.ask(0, [1.0] * 100) for _ in held]) == len(held)

    linked(test, ServeOptions(max_batch=500, max_delay_us=60_000_000), size=1 << 13)


def test_an_answer_that_does_not_fit_is_an_error_and_no_memory_is_lost() -> None:
    async def test(found: Linked) -> None:
        for _ in range(50):
            error = (await found.ask(0, [1.0], "\n" * 1500)[1]).error  # longer as an answer: no
            assert error is None
            asked = [found.ask(0, [1.0], "x" * 900)[1] for _ in range(4)]
            errors = [(await each).error for each in asked]
            assert all(error is None or isinstance(error, Overloaded) for error in errors)

    linked(test, size=1 << 13)


def test_when_the_process_of_the_engines_ends_requests_get_503_and_a_new_one_answers() -> None:
    async def test(found: Linked) -> None:
        asked = [found.ask(0, [1.0])[1] for _ in range(5)]
        other = found.ask(1, [1.0])[1]
        while found.repository.find("a").waiting < 6:
            await asyncio.sleep(0)
        first = found.ends[0]
        assert first.transport is not None
        first.transport.abort()
        for each in asked:
            error = (await each).error
            assert isinstance(error, Overloaded)
            assert "is being replaced" in error.message
        model = found.served[0].find("a")
        assert model.why_not_ready() is not None
        with pytest.raises(Overloaded, match="is being replaced"):
            found.ask(0, [1.0])
        outcomes = model.metrics.status()["outcomes"]
        assert (outcomes["failed"], outcomes["rejected"]) == (5, 1)
        assert not other.done()
        while found.repository.find("a").waiting > 1:  # they left the queue
            await asyncio.sleep(0)
        await found.connect(0)
        assert model.why_not_ready() is None
        asked = [found.ask(0, [1.0])[1] for _ in range(7)]
        assert [values(await each) for each in [*asked, other]] == [("ba", [2.0])] * 8

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_a_process_that_hangs_does_not_make_clients_wait_for_ever() -> None:
    async def test(found: Linked) -> None:
        pending, answered = found.ask(0, [1.0])
        model = found.served[0].find("a")
        model.expire()
        assert not answered.done()
        pending.give_up_us = monotonic_us() - 10_000_000
        model.expire()
        assert isinstance((await answered).error, Expired)
        assert model.metrics.status()["outcomes"]["expired"] == 1
        model.expire()

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_what_a_request_says_of_itself_reaches_the_batch() -> None:
    seen: list[Pending] = []

    class Seen(Watcher):
        def record_run(self, run: BatchRun) -> None:
            seen.extend(run.requests)

    async def test(found: Linked) -> None:
        found.repository.find("a").watch(Seen())
        answered = found.loop.create_future()
        feeds = {"word": np.array(["ab"], object), "x": np.ones((1, 1), np.float32)}
        request = Request(feeds, 1, (("x", "FP32", (1,)),), (), priority=1 << 63)
        found.served[0].find("a").submit(request, answered.set_result, trace="00-ab-cd-01")
        sent = await answered
        (ran,) = seen
        assert (ran.trace, ran.priority) == ("00-ab-cd-01", 0)
        same = ("arrived_us", "deadline_us", "give_up_us", "decode_us", "rows")
        assert [getattr(ran, n) for n in same] == [getattr(sent, n) for n in same]

    linked(test)


def test_tensors_of_another_dtype_are_refused_and_their_memory_is_free_again() -> None:
    async def test(found: Linked) -> None:
        feeds = {"word": np.array(["ab"], object), "x": np.ones((1, 100), np.float64)}
        for _ in range(100):
            with pytest.raises(BadInput, match="'x' is float32, got float64"):
                found.served[0].find("a").submit(Request(feeds, 1, (), ()), lambda _: None)

    linked(test, size=1 << 13)


def test_other_models_are_noticed_and_other_facts_are_taken_over() -> None:
    async def test(found: Linked) -> None:
        link = found.links[0]
        described = {n: RemoteEngine.of(m) for n, m in found.repository.models.items()}
        assert link.describe(described)
        later = described["a"].in_use._replace(generation=7)
        changed = RemoteEngine(**{**vars(described["a"]), "notes": ("new",), "in_use": later})
        assert link.describe({**described, "a": changed})
        model = found.served[0].find("a")
        assert (model.notes, model.in_use.generation) == (("new",), 7)
        assert model.metadata()["parameters"]["generation"] == "7"
        other = RemoteEngine(**{**vars(described["a"]), "inputs": described["a"].outputs})
        assert not link.describe({**described, "a": other})
        assert not link.describe({"a": described["a"]})

    linked(test)


def test_an_error_of_a_class_of_its_own_is_still_an_error() -> None:
    async def test(found: Linked) -> None:
        def refuse(_: Pending) -> None:
            raise Overloaded("no", hint="later")

        found.repository.find("a").batcher.submit = refuse
        error = (await found.ask(0, [1.0])[1]).error
        assert type(error) is Overloaded
        assert isinstance(error, DeploykitError)
        assert (error.message, error.hint) == ("no", "later")

    linked(test)


# -- `serve --workers shared:2`: two processes for the clients, one for the engines of both


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
