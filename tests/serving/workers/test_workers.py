"""`serve --workers 2` and `shared:2`: one server to its clients, whichever process they reach."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import resource
import signal
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from deploykit.core.errors import DeploykitError, Overloaded, Unsupported
from deploykit.core.machine import usable_cores
from deploykit.serving.batching.queue import BatchRun, Pending
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.metrics import BucketCounts, Sample
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import (
    Workers,
    check_on_cpu,
    choose_workers,
    decide_workers,
    threads_each,
    time_threads,
)
from deploykit.serving.server import Server
from deploykit.serving.web.page import status
from deploykit.serving.workers import group, parent, signals
from deploykit.serving.workers.group import Member, ServerGroup
from deploykit.serving.workers.link import Channel, LinkLost
from deploykit.serving.workers.parent import Hub, Worker
from tests.support.fake_engine import FakeEngine
from tests.support.runtimes.large_model import write_model
from tests.support.serving.faults import (
    BROKEN,
    LIMIT_S,
    REAL,
    REFUSED,
    Clients,
    Process,
    is_running,
    refused,
    request,
    until,
)
from tests.support.serving.reloading import model, replace
from tests.support.serving.serve_faulty import HANG, POISON

MANY = 24  # connections, of which each of two workers gets some: all but 1 in 8 million times
TWO, SHARED = ("--workers", "2"), ("--workers", "shared:2")
INFER = ("POST", "/v2/models/m/infer", request(1))
both = pytest.mark.parametrize("count", ["2", "shared:2"])


@pytest.fixture(scope="module", params=["2", "shared:2"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    options = ("--workers", request.param, "--shared-memory", "--grpc-port", "0")
    folder = tmp_path_factory.mktemp("workers")
    with Process(folder, *options, "--timeout-ms", "60000") as found:
        found.shared_engines = request.param == "shared:2"
        yield found


def workers(server: Process) -> list[int]:
    """The pids of the processes that serve."""
    pid = server.popen.pid
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def sockets(pid: int) -> set[str]:
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(each.readlink()))
    return {each for each in found if each.startswith("socket:")}


def kill(server: Process, worker: int) -> None:
    """Returns when its parent has noticed; until then the kernel may still give it connections."""
    count = len(server.log_lines())
    os.kill(worker, signal.SIGKILL)
    until(lambda: any("ended by SIGKILL" in line for line in server.log_lines()[count:]))


@contextmanager
def connections(server: Process, count: int = MANY) -> Iterator[list[http.client.HTTPConnection]]:
    """Open connections, which the kernel has divided among the workers."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S))
            stack.callback(found[-1].close)
        yield found


def ask(
    connection: http.client.HTTPConnection, method: str, target: str, body: bytes = b""
) -> tuple[int, Any]:
    connection.request(method, target, body)
    reply = connection.getresponse()
    text = reply.read()
    return reply.status, json.loads(text) if text.startswith((b"{", b"[")) else text


def engines(server: Process) -> int:
    """The pid of the process that runs them: others connect to a socket of it alone."""
    return listener(server)[0]


def listener(server: Process) -> tuple[int, str]:
    """The pid of the process that runs the engines, and the address of its socket."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[6]}]": row[-1] for row in rows if int(row[3], 16)}
    (found,) = [
        (pid, listening[each].replace("@", "\0"))
        for pid in workers(server)
        for each in sockets(pid) & listening.keys()
    ]
    return found


def fronts(server: Process) -> list[int]:
    pids = workers(server)
    return [pid for pid in pids if len(pids) == 2 or pid != engines(server)]


def logged(server: Process, text: str) -> int:
    return sum(text in line for line in server.log_lines())


def statuses(server: Process, *asked: Any) -> set[int]:
    """Those of new connections, of which each process has some."""
    with connections(server) as clients:
        return {ask(client, *asked)[0] for client in clients}


def test_all_workers_answer_and_any_of_them_has_the_figures_of_all(server: Process) -> None:
    before = server.gauge("nv_inference_count")
    idle = [len(sockets(pid)) for pid in fronts(server)]
    with connections(server) as clients:
        for number, client in enumerate(clients):
            status, found = ask(client, "POST", "/v2/models/m/infer", request(number))
            assert (status, found["outputs"][0]["data"][0]) == (200, 2 * number + 1)
        open_now = [len(sockets(pid)) for pid in fronts(server)]
        assert all(now > then for now, then in zip(open_now, idle, strict=True))
        count = 1 if server.shared_engines else 2
        for client in clients[:8]:
            (stats,) = ask(client, "GET", "/v2/models/m/stats")[1]["model_stats"]
            assert stats["inference_count"] == before + MANY
            status = ask(client, "GET", "/status")[1]
            (figures,) = status["models"]
            assert (figures["rows"], figures["engines"]) == (before + MANY, count)
            assert (figures["queue"], status["workers"]["serving"]) == (1024, 2)
            (instances,) = ask(client, "GET", "/v2/models/m/config")[1]["instance_group"]
            assert instances["count"] == 1
    assert server.gauge("nv_inference_count") == before + MANY
    assert (server.gauge("deploykit_workers"), server.gauge("deploykit_engines")) == (2, count)
    assert server.gauge("deploykit_requests_in_flight") == 0


def test_grpc_shares_its_port_and_the_figures(server: Process) -> None:
    from tritonclient import grpc

    before = server.gauge("nv_inference_count")
    streamed: list[float] = []
    for number in range(MANY):
        with grpc.InferenceServerClient(server.grpc) as client:
            item = grpc.InferInput("x", [1, 4], "FP32")
            item.set_data_from_numpy(np.full((1, 4), number, np.float32))
            assert client.infer("m", [item]).as_numpy("y")[0, 0] == 2 * number + 1
            client.start_stream(lambda result, error: streamed.append(result.as_numpy("y")[0, 0]))  # noqa: ARG005
            client.async_stream_infer("m", [item])
            client.stop_stream()
            counted = client.get_inference_statistics("m").model_stats[0].inference_count
            assert counted == before + 2 * number + 2
    assert streamed == [2 * number + 1 for number in range(MANY)]


def test_an_error_of_the_engine_reaches_the_client_the_metrics_and_the_log(server: Process) -> None:
    before = server.gauge("nv_inference_request_failure")
    with connections(server) as clients:
        found = [ask(each, "POST", "/v2/models/m/infer", request(POISON)) for each in clients]
    assert all(status == 500 and "the engine failed" in str(error) for status, error in found)
    assert server.gauge("nv_inference_request_failure") == before + MANY

    def named() -> set[str]:
        lines = [line for line in server.log_lines() if "RuntimeError" in line]
        return {line.rpartition(" ")[2] for line in lines}

    until(lambda: server.shared_engines or named() == {"worker=1", "worker=2"})


def test_a_region_that_one_worker_registers_serves_requests_to_all(
    server: Process, shared: str
) -> None:
    Path(f"/dev/shm{shared}").write_bytes(struct.pack("<4f", 1, 2, 3, 4) + bytes(48))
    base = "/v2/systemsharedmemory/region/frame"
    region = {"shared_memory_region": "frame", "shared_memory_byte_size": 16}
    item = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": region}
    infer = ("POST", "/v2/models/m/infer", json.dumps({"inputs": [item]}).encode())
    absent, register = (
        ("POST", f"{base}/register", json.dumps({"key": key, "byte_size": 64}).encode())
        for key in ("/nothing-here", shared)
    )
    with connections(server) as clients:
        status, found = ask(clients[0], *absent)
        assert (status, "cannot be opened" in found["error"]) == (400, True)
        assert ask(clients[0], "GET", "/v2/systemsharedmemory/status") == (200, [])
        assert ask(clients[0], *register)[0] == 200
        answers = [ask(client, *infer) for client in clients]
        assert {status for status, _ in answers} == {200}
        assert all(found["outputs"][0]["data"] == [3, 5, 7, 9] for _, found in answers)
        assert {ask(client, *register)[0] for client in clients} == {400}
        assert ask(clients[0], *infer)[0] == 200  # a refusal has unregistered nothing
    counted = server.gauge("nv_inference_count")
    kill(server, fronts(server)[0])
    assert server.gauge("nv_inference_count") == counted  # those of the dead one too
    until(lambda: server.gauge("deploykit_worker_restarts_total") == 1)
    until(lambda: server.gauge("deploykit_workers") == 2)
    with connections(server) as clients:
        assert {ask(client, *infer)[0] for client in clients} == {200}  # the new one has it too
        assert ask(clients[0], "POST", f"{base}/unregister")[0] == 200
        assert {ask(client, *infer)[0] for client in clients} == {400}


STEPS = """
import numpy as np
add = {"model": "add.onnx", "x": "rows"}
def rows(values: list[float]) -> np.ndarray: return np.array(values, np.float32).reshape(1, 4)
def answer(add: np.ndarray) -> list[float]: return add.reshape(-1).tolist()
"""


@both
def test_tls_and_pipelines_are_with_the_workers_and_count_for_all(
    tmp_path: Path, pem: tuple[Path, Path], count: str
) -> None:
    path, steps = model(tmp_path / "add.onnx", 1.0), tmp_path / "steps.py"
    steps.write_text(STEPS)
    cert, key = map(str, pem)
    options = ("--workers", count, "--tls-cert", cert, "--tls-key", key, "--pipeline", str(steps))
    trusted = ssl.create_default_context(cafile=cert)
    with Process(tmp_path, *options, command=REAL, engine=f"m={path}") as server:
        for number in range(1, 5):
            client = http.client.HTTPSConnection("localhost", server.port, context=trusted)
            body = json.dumps([number, 0, 0, 0]).encode()
            expected = [number + 1.0, 1.0, 1.0, 1.0]
            assert ask(client, "POST", "/v2/models/steps/predict", body) == (200, expected)
            (stats,) = ask(client, "GET", "/v2/models/steps/stats")[1]["model_stats"]
            assert stats["inference_stats"]["success"]["count"] == number
            stages = {
                n: each["compute_infer"]["count"] for n, each in stats["response_stats"].items()
            }
            assert stages == dict.fromkeys(["values", "rows", "add", "answer"], number)
            client.close()


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


@both
def test_a_killed_process_is_replaced_and_loses_only_its_own_connections(
    tmp_path: Path, count: str
) -> None:
    """Each process may open as many files as the system allows, whatever the soft limit is."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (1024, hard))
    env = {"FAULT_LATENCY_S": "0.002"}
    with Process(tmp_path, "--workers", count, env=env, before=limit) as server:
        until(lambda: b"process_max_fds" in server.ask("GET", "/metrics")[2])
        assert server.gauge("process_max_fds") == len(workers(server)) * min(hard, 1 << 14)

        def kill_one(victim: int) -> dict[int, int]:
            """Kill it under load; return the outcomes of the clients."""
            others = {pid for pid in workers(server) if pid != victim}
            with Clients(server.port, 12) as clients:
                until(lambda: len(clients.outcomes) > 100)
                before = server.gauge("deploykit_requests_total")
                kill(server, victim)
                until(lambda: server.gauge("deploykit_workers") == 2)
                until(lambda: server.status("/v2/health/ready") == 200)
                seen = len(clients.outcomes)
                until(lambda: len(clients.outcomes) > seen + 100)
                counts = clients.stop()
            assert others < set(workers(server))
            assert server.gauge("deploykit_requests_total") >= before  # counters never decrease
            until(lambda: server.gauge("deploykit_requests_in_flight") == 0)  # of the dead, too
            return counts

        victim = fronts(server)[0]
        counts = kill_one(victim)
        assert counts.keys() <= {200, BROKEN}
        assert counts[BROKEN] <= 2 * 12  # one that connects again may still reach the dead one
        assert logged(server, "was ended by SIGKILL")
        if count != "2":
            assert kill_one(engines(server)).keys() == {200, 503}  # no connection broke
            assert logged(server, "the process of the engines was ended")
        server.popen.terminate()
        assert server.wait() == 0


def test_a_worker_that_hangs_is_replaced_and_the_others_report_meanwhile(tmp_path: Path) -> None:
    env = {"FAULT_MISSED": "3", "FAULT_WATCH_S": "0.3"}
    with Process(tmp_path, *TWO, env=env) as server:
        assert statuses(server, "GET", "/v2/health/live") == {200}
        stopped, other = workers(server)
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: len(workers(server)) == 2 and stopped not in workers(server))
        assert other in workers(server)
        assert logged(server, "worker 1 does not answer")
        until(lambda: server.gauge("deploykit_workers") == 2)


def test_an_engine_that_hangs_in_one_worker_makes_the_server_not_ready(tmp_path: Path) -> None:
    with Process(tmp_path, *TWO, "--timeout-ms", "200") as server:
        assert server.infer(HANG)[0] == 504
        until(lambda: statuses(server, "GET", "/v2/health/ready") == {503})
        assert server.gauge("deploykit_engines_hung") == 1


# -- The end


@pytest.mark.parametrize(
    ("count", "number", "to_all"),
    [
        ("2", signal.SIGTERM, False),
        ("2", signal.SIGHUP, True),  # a terminal that closes sends it to all
        ("shared:2", signal.SIGTERM, True),  # as `timeout` does
    ],
)
def test_a_signal_to_end_under_load_loses_nothing(
    tmp_path: Path, count: str, number: signal.Signals, to_all: bool
) -> None:
    default: Callable[[], object] = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    options = ("--workers", count)
    with Process(tmp_path, *options, env={"FAULT_ROWS": "4"}, before=default) as server:
        with Clients(server.port, 16) as clients:
            until(lambda: len(clients.outcomes) > 100)
            server.hold()
            answered = clients.all_wait(server)
            for pid in workers(server) if to_all else ():
                os.kill(pid, number)
            server.popen.send_signal(number)
            until(lambda: server.status("/v2/health/ready") == 503)
            server.release()
            assert server.wait() == 0
            counts = clients.stop()
        assert clients.next_after(answered) == [200] * 16
        assert counts.keys() <= {200, 503, BROKEN, REFUSED}
        assert not logged(server, "not answered")


def is_ending(server: Process) -> bool:
    """Whether the server has seen a signal; soon after that its port is closed."""
    try:
        return server.status("/v2/health/ready") == 503
    except ConnectionRefusedError:
        return True


@pytest.mark.parametrize("count", ["1", "2"])
@pytest.mark.parametrize(("number", "echo_s"), [(signal.SIGINT, "600"), (signal.SIGTERM, "0.05")])
def test_a_second_signal_ends_all_at_once(
    tmp_path: Path, count: str, number: signal.Signals, echo_s: str
) -> None:
    with Process(tmp_path, "--workers", count, env={"FAULT_ECHO_S": echo_s}) as server:
        pids = workers(server)
        with connections(server, 4) as clients:
            for client in clients:
                client.request("POST", "/v2/models/m/infer", request(HANG))
            until(lambda: server.gauge("deploykit_requests_in_flight") == 4)
            server.popen.send_signal(signal.SIGTERM)
            until(lambda: is_ending(server))
            time.sleep(0.1)
            server.popen.send_signal(number)
            assert server.wait() == 130
        until(lambda: not any(map(is_running, pids)))


def test_a_worker_that_closes_its_engines_for_long_is_not_killed(tmp_path: Path) -> None:
    """It was after 5 s, and its answered requests counted as lost: exit code 1."""
    with Process(tmp_path, *TWO, env={"FAULT_CLOSE_S": "6"}) as server:
        server.popen.terminate()
        assert server.wait() == 0


def ours(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if "deploykit" in name}  # noqa: PTH208


@both
def test_weights_are_in_memory_once_and_kill_9_of_any_process_leaves_nothing(
    tmp_path: Path, count: str
) -> None:
    """Those of a replacing file and of a worker that is started later are shared, too."""
    memory = Path("/dev/shm")
    before, path = ours(memory), write_model(tmp_path / "m.onnx")

    def mapped() -> set[str]:
        """The files that all processes with engines map."""
        pids = workers(server) if count == "2" else [engines(server)]
        pattern = rf"{tmp_path}/deploykit-weights-\S+/weights"
        one, *others = (
            set(re.findall(pattern, Path(f"/proc/{pid}/maps").read_text())) for pid in pids
        )
        return one if others in ([], [one]) else set()

    env = {"TMPDIR": str(tmp_path)}
    with Process(tmp_path, "--workers", count, command=REAL, engine=f"m={path}", env=env) as server:
        (first,) = mapped()
        replace(write_model(tmp_path / "new.onnx", seed=1), path)
        until(lambda: server.gauge("deploykit_model_generation") == 2)
        until(lambda: mapped() not in (set(), {first}))
        pids = workers(server)
        for victim in pids:
            kill(server, victim)
            until(lambda: len(workers(server)) == len(pids))
            until(lambda: server.gauge("deploykit_workers") == 2)
            until(lambda: server.status("/v2/health/ready") == 200)
        assert mapped() not in (set(), {first})
        until(lambda: len(ours(tmp_path)) == 1)
        pids = workers(server)
        server.popen.kill()
        server.wait()
        until(lambda: not any(map(is_running, pids)))
    assert ours(tmp_path) == set()
    until(lambda: ours(memory) <= before)  # other tests may have some for a moment


def test_a_worker_ends_once_its_parent_has_closed_all_its_files() -> None:
    """The kernel closes them one after another: the link may be before the lock of the weights."""
    found: list[int] = []

    async def lose() -> None:
        ends = [socket.socketpair() for _ in range(2)]
        member = Member(1, 1, ends[0][0], {})
        drained = asyncio.Event()
        joining = asyncio.ensure_future(member.join(cast("Any", None), drained.set, drained.set))
        member.parent = os.getppid()  # one that still runs
        ends[0][1].close()
        await asyncio.sleep(0.1)
        assert not drained.is_set()
        member.parent = 0
        await asyncio.wait_for(drained.wait(), LIMIT_S)
        await joining
        member.offer({"samples": lambda: 7}, {})
        member.collect("samples", lambda result: found.append(result()))
        assert found == [7]  # of itself alone
        asyncio.get_running_loop().remove_reader(ends[1][0])
        for each in (ends[0][0], *ends[1]):
            each.close()

    asyncio.run(lose())


def test_no_signal_interrupts_what_a_worker_cleans_up_once_its_server_has_ended() -> None:
    """The kernel may deliver that of the parent's end after the worker has seen it and drained."""

    class Leaving(ServerGroup):
        ends_process = Member.ends_process

    server = Server({"m": FakeEngine()}, ServeOptions(http_port=0, grpc_port=None), None, Leaving())
    assert server.run(lambda *_: server.stop()) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, group._end)  # a second signal does not interrupt its end either
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


def test_a_program_whose_server_has_ended_can_be_ended_a_second_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it is over, what comes again is the echo of what ended the server."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    server = Server({"m": FakeEngine()}, ServeOptions(http_port=0, grpc_port=None))
    assert server.run(lambda *_: signal.raise_signal(signal.SIGTERM)) == 0
    signal.raise_signal(signal.SIGTERM)
    assert seen == []
    monkeypatch.setattr(signals, "ECHO_S", 0.0)
    signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM]


# -- Files that change, and pipelines that fork


@pytest.mark.parametrize("count", ["1", "2", "shared:2"])
def test_a_wrong_file_is_reported_and_the_next_right_one_is_in_use_everywhere(
    tmp_path: Path, count: str
) -> None:
    path = model(tmp_path / "m.onnx", 1.0)

    def facts() -> set[tuple[str, str, float]]:
        """Notes, generation and answer of each process."""
        found = set()
        for client in clients:
            parameters = ask(client, "GET", "/v2/models/m")[1]["parameters"]
            (output,) = ask(client, *INFER)[1]["outputs"]
            notes = parameters.get("notes", "").partition(" of one engine")[0]
            found.add((notes, parameters["generation"], output["data"][0]))
        return found

    with (
        Process(tmp_path, "--workers", count, command=REAL, engine=f"m={path}") as server,
        connections(server) as clients,
    ):
        replace(model(tmp_path / "new.onnx", 1.0, width=5), path)
        until(lambda: facts() == {("the inputs", "1", 2.0)})
        replace(model(tmp_path / "new.onnx", 2.0), path)
        until(lambda: facts() == {("", "2", 3.0)})
        server.popen.terminate()
        assert server.wait() == 0
    for stage in ("was rejected, the previous engine stays in use", "was replaced and is in use"):
        assert logged(server, stage) == (2 if count == "2" else 1)  # once for each process


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


FORKING = """
import os, time
import numpy as np
add = {"model": "m.onnx", "x": "rows"}
open(f"read.{os.getpid()}", "w").close()

def rows(values: list[float]) -> np.ndarray:
    forked = os.fork()
    if not forked:
        os.closerange(0, 3)  # which the test reads to their end
        time.sleep(3600)
    open(f"forked.{forked}", "w").close()
    return np.array(values, np.float32).reshape(1, 4)

def answer(add: np.ndarray) -> list[float]:
    return add.reshape(-1).tolist()
"""


def test_what_a_pipeline_forks_holds_no_worker_and_ends_with_the_server(tmp_path: Path) -> None:
    """It held the sockets of a killed worker: clients got no answer, the parent waited a minute.

    No forked process has read a pipeline: a file that ran PyTorch had each worker wait for ever for
    threads that no fork has.
    """
    steps, path = tmp_path / "steps.py", model(tmp_path / "m.onnx", 1.0)
    steps.write_text(FORKING)
    predict = ("POST", "/v2/models/steps/predict", b"[1, 2, 3, 4]")

    def named(what: str) -> set[int]:
        return {int(each.suffix[1:]) for each in tmp_path.glob(f"{what}.*")}

    options = (*TWO, "--pipeline", str(steps))
    try:
        with Process(tmp_path, *options, command=REAL, engine=f"m={path}") as server:
            assert server.popen.pid not in named("read") > set(workers(server))
            assert statuses(server, *predict) == {200}
            earlier = named("forked")
            kill(server, workers(server)[0])
            until(lambda: server.gauge("deploykit_workers") == 2)
            assert statuses(server, *predict) == {200}
            assert all(map(is_running, earlier))
            server.popen.terminate()
            assert server.wait() == 0
            assert not logged(server, "is killed")
            until(lambda: not any(map(is_running, named("forked") - earlier)))
    finally:
        for each in named("forked"):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


# -- Starts that fail, and processes that cannot be started again


def test_a_start_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (32, 32))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        opens = "m.onnx: cannot be opened once more"
        endless = ("--workers", "shared:200", "--max-body-bytes", str(1 << 40))
        rows: list[tuple[tuple[str, ...], dict[str, Any], int, str]] = [
            (("--workers", "0"), {}, 2, "--workers 0: must be a number from 1 to 256, shared:N"),
            ((*TWO, "--http-port", str(port)), {}, 2, f"--http-port {port}: already in use on 127"),
            ((), {"env": {"FAULT_LOAD": "1"}}, 3, "cuda:0: out of memory: 9.0 GiB needed, 1.0"),
            (TWO, {"env": {"FAULT_OPENS": "0"}}, 2, opens),
            (TWO, {"env": {"FAULT_OPENS": "1"}}, 2, opens),
            (("--workers", "30"), {"before": files}, 3, "--workers 30: a process cannot be start"),
            (endless, {}, 3, "--workers 200: 2199157473280 bytes for each cannot be shared"),
        ]
        for options, how, code, words in rows:
            for each in tmp_path.glob("opened.*"):
                each.unlink()
            found, text = refused(tmp_path, *options, **how)
            errors = [line for line in text.splitlines() if line.startswith("error:")]
            assert found == code
            assert len(errors) == 1
            assert errors[0].startswith(f"error: {words}")


def files(pid: int) -> set[int]:
    return {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}


def leave_no_file(pid: int) -> None:
    """Let the process open no file more."""
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    soft = hard
    for _ in range(50):  # it may have one open for a moment
        soft = min(soft, *(set(range(1000)) - files(pid)))
        time.sleep(0.01)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def leave_files(pid: int) -> None:
    """Let the process open as many files as it may."""
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))


def test_a_worker_that_cannot_be_replaced_is_tried_again_until_it_can(tmp_path: Path) -> None:
    """First no process can be started for it, then it cannot open its model; at last none can."""
    env = {"FAULT_OPENS": "2", "FAULT_DELAY_S": "0.01"}
    with Process(tmp_path, *TWO, env=env) as server:
        leave_no_file(server.popen.pid)
        kill(server, workers(server)[0])
        until(lambda: logged(server, "cannot be started: Too many open files") > 2)
        assert server.infer(1.0) == (200, [3.0])
        leave_files(server.popen.pid)
        until(lambda: logged(server, "cannot be opened once more") > 1)
        assert server.infer(2.0) == (200, [5.0])
        for each in tmp_path.glob("opened.*"):
            each.unlink()
        until(lambda: server.gauge("deploykit_workers") == 2)
        for number in (1, 2):
            (tmp_path / f"opened.{number}").touch()
        for pid in workers(server):
            os.kill(pid, signal.SIGKILL)
        assert server.wait() == 2
        assert logged(server, "no worker is left")
        assert "error: m.onnx: cannot be opened once more" in server.log_lines()


def test_what_keeps_the_last_worker_from_starting_again_is_not_reported_as_a_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 70, if it was no error of ours: no thread is left, for example."""

    async def keep() -> BaseException | None:
        found = parent.Parent(1, print, ServeOptions(http_port=0, grpc_port=None), print)
        found._stopped, found._started = asyncio.Event(), True
        found._failures[1] = parent.MOST_FAILURES
        with subprocess.Popen(["true"]) as child:
            worker = Worker(1, child.pid, mmap(-1, group.RESULT_BYTES))
            group._leave(RuntimeError("can't start new thread"), worker._result)
            worker.lost.set()
            found._workers[worker.pid] = worker
            monkeypatch.setattr(found, "_fork", lambda _: asyncio.sleep(0, worker))
            await found._keep(1)
        for each in (found._listener, *found._ports.values()):
            each.close()
        return found._failure

    assert isinstance(asyncio.run(keep()), DeploykitError)


def test_a_worker_that_leaves_its_parent_no_file_for_the_log_is_not_forgotten(
    tmp_path: Path,
) -> None:
    """Nothing ended it, nor waited for it."""
    with Process(tmp_path, *TWO, env={"FAULT_DELAY_S": "0.01"}) as server:
        pid = server.popen.pid
        most, hard = max(files(pid)), resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        spare = most + 1 - len(files(pid))  # 3 are left for the worker: its link and the port
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most + 2 - spare, hard))
        kill(server, workers(server)[0])
        until(lambda: logged(server, "Too many open files") > 2)
        leave_files(pid)
        until(lambda: server.gauge("deploykit_workers") == 2)
        assert len(workers(server)) == 2


def test_a_connection_to_the_engines_that_no_file_is_left_for_is_made_once_there_is(
    tmp_path: Path,
) -> None:
    """To refuse a connection, the process closes a file that it opened early, and opens it again.

    So no lower number is to be free, or the connection waits unanswered: others fill the gaps.
    """
    with Process(tmp_path, *SHARED, env={"FAULT_CONNECT_S": "0.05"}) as server, ExitStack() as gaps:
        runs_them, address = listener(server)
        before = len(files(runs_them))
        (victim, *_) = fronts(server)
        os.kill(server.popen.pid, signal.SIGSTOP)  # which would start another one meanwhile
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(files(runs_them)) < before)
        while len(found := files(runs_them)) <= max(found):
            connected = len(sockets(runs_them))
            gaps.enter_context(socket.socket(socket.AF_UNIX)).connect(address)
            until(lambda connected=connected: len(sockets(runs_them)) > connected)
        leave_no_file(runs_them)
        os.kill(server.popen.pid, signal.SIGCONT)
        until(lambda: logged(server, "cannot connect to the engines") > 5)
        assert server.gauge("deploykit_workers") == 1
        assert server.status("/v2/health/ready") in (200, 503)
        gaps.close()
        leave_files(runs_them)
        until(lambda: server.gauge("deploykit_workers") == 2)
        until(lambda: statuses(server, *INFER) == {200})
        until(lambda: len(files(runs_them)) == before)


# -- The figures of several workers as those of one server


def report(*sizes: int) -> parent.Report:
    """Of a worker that ran one batch of each of `sizes`, in 10 us per row."""
    with_one = ModelRepository({"m": FakeEngine()}, ServeOptions(queue=5))
    (model,) = with_one.models.values()
    for rows in sizes:
        pending = Pending({}, rows, (), lambda _: None, 0, 1, 1, 0, None, 0)
        model.metrics.record_run(BatchRun([pending], 0, 0, 0, 10 * rows, 0, 0))
        model.metrics.record_answer(pending, 1, 100)
    found = {
        "samples": with_one.samples(),
        "statistics": with_one.statistics(),
        "status": status(with_one),
    }
    with_one.close()
    return found


def value(samples: list[Sample], name: str, **labels: str) -> float | BucketCounts:
    (found,) = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
    return found.value


def test_gauges_show_what_an_operator_has_to_see() -> None:
    labels = {"model": "m", "version": "1"}
    values = {
        "deploykit_model_ready": (1, 0, 0),
        "deploykit_model_generation": (2, 1, 1),
        "deploykit_reload_failed": (0, 1, 1),
        "deploykit_queue_depth": (3, 4, 7),
        "deploykit_batch_limit_rows": (32, 16, 32),
        "nv_gpu_utilization": (0.5, 0.5, 0.5),
        "nv_energy_consumption": (7.0, 7.5, 7.5),  # of the one GPU that both have
    }
    reports = [{"samples": [Sample(n, labels, v[i]) for n, v in values.items()]} for i in (0, 1)]
    merged = {sample.name: sample.value for sample in parent.merge_samples(reports)}
    assert merged == {name: each[2] for name, each in values.items()}


def test_figures_are_added_up_and_have_the_form_of_those_of_one() -> None:
    reports = [report(1, 4), report(4)]
    for number, each in enumerate(reports):
        each["status"]["process"] = {"cpu_s": 2.0, "started_s": 10 + number, "at_s": 20 + number}
    samples = parent.merge_samples(reports)
    assert value(samples, "deploykit_requests_total", outcome="success") == 3
    assert value(samples, "nv_inference_count") == 9
    rows = value(samples, "deploykit_batch_rows")
    assert isinstance(rows, BucketCounts)
    counts = dict(rows.counts)
    assert (counts["1"], counts["4"], counts["+Inf"], rows.total) == (1, 3, 3, 9)
    (model,), (one,) = (
        each["model_stats"] for each in (parent.merge_statistics(reports), reports[0]["statistics"])
    )
    assert model.keys() == one.keys()
    assert (model["inference_count"], model["execution_count"]) == (9, 3)
    assert model["inference_stats"]["success"]["count"] == 3
    sizes = {b["batch_size"]: b["compute_infer"] for b in model["batch_stats"]}
    assert sizes == {1: {"count": 1, "ns": 10_000}, 4: {"count": 2, "ns": 80_000}}
    status, alone = parent.merge_status(reports), reports[0]["status"]
    (model,), (one,) = status["models"], alone["models"]
    assert (status.keys(), model.keys()) == (alone.keys(), one.keys())
    assert (model["rows"], model["queue"], model["engines"]) == (9, 10, 2)
    assert (model["outcomes"]["success"], sum(model["request"]["counts"])) == (3, 3)
    assert status["process"] == {"cpu_s": 4.0, "started_s": 10, "at_s": 21}


@pytest.mark.parametrize("dead", [1, 2])
def test_a_worker_that_has_ended_leaves_its_counters_alone(dead: int) -> None:
    ended = parent.counters([report(1)])
    for _ in range(dead - 1):
        ended = parent.counters([ended, report(1)])
    reports = [report(4), ended]
    samples = parent.merge_samples(reports)
    assert value(samples, "deploykit_requests_total", outcome="success") == 1 + dead
    assert value(samples, "deploykit_engines") == 1
    status = parent.merge_status(reports)
    assert status["models"][0]["rows"] == 4 + dead
    assert status["models"][0]["engines"] == 1
    (model,) = parent.merge_statistics(reports)["model_stats"]
    assert model["inference_count"] == 4 + dead


def test_the_end_of_the_engines_leaves_the_counters_of_pipelines_which_they_have_not() -> None:
    front = report(2)
    (model,) = front["status"]["models"]
    front["status"]["models"].append({**model, "name": "pipeline"})
    ended = parent.counters([parent.counters([front]), report(1)])
    found = parent.merge_status([front, ended])["models"]
    assert {each["name"]: each["rows"] for each in found} == {"m": 5, "pipeline": 4}


def test_many_changes_at_once_do_not_make_a_slow_worker_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each counted as if it were another second: a client with 30 regions had it killed."""
    monkeypatch.setattr(parent, "REPORT_S", 0.01)

    async def change() -> tuple[list[Any], int]:
        worker = Worker(1, os.getpid(), mmap(-1, 1))
        worker.ready = True
        ours, theirs = socket.socketpair()
        worker.link = Channel(print, cast("Any", print), print)
        await worker.link.connect(ours)
        found = Hub({worker.pid: worker}, 1)
        asked = [found.answer(("change", "register", (str(n),))) for n in range(100)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        late = worker.link.ask("report")
        theirs.close()  # it ends
        for each in (late, worker.link.ask("report")):
            with pytest.raises(LinkLost):
                await asyncio.wait_for(each, 60)
        return answers, worker.missed

    answers, missed = asyncio.run(change())
    assert {type(each) for each in answers} == {Overloaded}
    assert missed == 0


# -- How many, and which


@pytest.mark.parametrize(
    ("timed", "cores", "count"),
    [
        ({"m": (21, 42)}, 2, 2),
        ({"m": (124, 100)}, 64, 16),
        ({"m": (126, 100)}, 64, 1),
        ({"m": (21, 42), "large": (50_000, 20_000)}, 2, 1),
        ({"m": (0, 0)}, 4, 4),  # no shape was known to work
    ],
    ids=str,
)
def test_auto_starts_a_worker_for_each_core_unless_a_row_needs_them_all(
    timed: dict[str, tuple[int, int]], cores: int, count: int
) -> None:
    chosen, why = decide_workers(timed, cores)
    assert chosen == count
    assert all(name in why for name in timed) or "'large'" in why


def test_auto_times_each_model(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", 1.0)
    timed = time_threads({"m": path}, "cpu", 2, lambda *_: None)
    assert isinstance(timed, dict)
    assert min(timed["m"]) > 0


def test_the_engines_of_a_gpu_run_in_one_process(tmp_path: Path) -> None:
    path, plan = model(tmp_path / "m.onnx", 1.0), tmp_path / "m.trt"
    plan.write_bytes(b"ptrt" + bytes(64))

    def chosen(device: str, workers: int | str, file: Path = path) -> Workers:
        return choose_workers({"m": file}, ServeOptions(device=device, workers=workers))

    shared = Workers(2, shared=True)
    assert chosen("cuda", 2) == chosen("auto", 2, plan) == chosen("cpu", "shared:2") == shared
    assert chosen("cpu", 2) == Workers(2)
    assert chosen("cuda", "auto") == chosen("cuda", 1) == Workers(1)
    with pytest.raises(Unsupported, match="model 'm' runs on cuda:0") as caught:
        check_on_cpu("m", "cuda:0")
    assert "shared:2" in (caught.value.hint or "")


def test_workers_with_engines_divide_the_threads_and_others_leave_them_to_one() -> None:
    cores = usable_cores()
    assert threads_each(ServeOptions(), Workers(cores)) in (1, None)
    assert threads_each(ServeOptions(), Workers(cores, shared=True)) is None
    assert threads_each(ServeOptions(threads=3), Workers(2)) == 3
