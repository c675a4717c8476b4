"""`serve --workers 2`: one server to its clients, whichever process a connection reaches."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.machine import usable_cores
from deploykit.serving.options import ServeOptions
from deploykit.serving.processes import (
    Workers,
    check_on_cpu,
    choose_workers,
    decide_workers,
    parse_workers,
    threads_each,
    time_threads,
)
from tests.support.runtimes.large_model import write_model
from tests.support.serving.faults import (
    BROKEN,
    LIMIT_S,
    REAL,
    REFUSED,
    ROOT,
    STAND_IN,
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
    is_running,
    kill,
    sockets,
    workers,
)

TWO = ("--workers", "2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("two")
    options = (*TWO, "--shared-memory", "--grpc-port", "0", "--timeout-ms", "60000")
    with Process(folder, *options) as found:
        yield found


def test_all_workers_answer_and_any_of_them_has_the_figures_of_all(server: Process) -> None:
    before = server.gauge("nv_inference_count")
    idle = [sockets(pid) for pid in workers(server)]
    with connections(server) as clients:
        for number, client in enumerate(clients):
            status, found = ask(client, "POST", "/v2/models/m/infer", request(number))
            assert (status, found["outputs"][0]["data"][0]) == (200, 2 * number + 1)
        open_now = [sockets(pid) for pid in workers(server)]
        assert all(now > then for now, then in zip(open_now, idle, strict=True))
        for client in clients[:8]:
            (stats,) = ask(client, "GET", "/v2/models/m/stats")[1]["model_stats"]
            assert stats["inference_count"] == before + MANY
            status = ask(client, "GET", "/status")[1]
            assert status["models"][0]["rows"] == before + MANY
            assert status["workers"]["serving"] == 2
    assert server.gauge("nv_inference_count") == before + MANY
    assert server.gauge("deploykit_workers") == server.gauge("deploykit_engines") == 2


def test_grpc_shares_its_port_and_the_figures(server: Process) -> None:
    from tritonclient import grpc

    before = server.gauge("nv_inference_count")
    found = []
    for number in range(MANY):
        with grpc.InferenceServerClient(server.grpc) as client:
            item = grpc.InferInput("x", [1, 4], "FP32")
            item.set_data_from_numpy(np.full((1, 4), number, np.float32))
            found.append(float(client.infer("m", [item]).as_numpy("y")[0, 0]))
            counted = client.get_inference_statistics("m").model_stats[0].inference_count
            assert counted == before + number + 1
    assert found == [2.0 * number + 1 for number in range(MANY)]


def test_a_region_that_one_worker_registers_serves_requests_to_all(
    server: Process, shared: str
) -> None:
    Path(f"/dev/shm{shared}").write_bytes(struct.pack("<4f", 1, 2, 3, 4) + bytes(48))
    base = "/v2/systemsharedmemory/region/frame"
    region = {"shared_memory_region": "frame", "shared_memory_byte_size": 16}
    item = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": region}
    infer = ("POST", "/v2/models/m/infer", json.dumps({"inputs": [item]}).encode())
    register = json.dumps({"key": shared, "byte_size": 64}).encode()
    with connections(server) as clients:
        assert ask(clients[0], "POST", f"{base}/register", register)[0] == 200
        answers = [ask(client, *infer) for client in clients]
        assert {status for status, _ in answers} == {200}
        assert all(found["outputs"][0]["data"] == [3, 5, 7, 9] for _, found in answers)
        again = {ask(client, "POST", f"{base}/register", register)[0] for client in clients}
        assert again == {400}
        assert ask(clients[0], *infer)[0] == 200  # a refusal has unregistered nothing
    counted = server.gauge("nv_inference_count")
    kill(server, workers(server)[0])
    assert server.gauge("nv_inference_count") == counted  # those of the dead one too
    until(lambda: server.gauge("deploykit_worker_restarts_total") == 1)
    until(lambda: server.gauge("deploykit_workers") == 2)
    with connections(server) as clients:
        assert {ask(client, *infer)[0] for client in clients} == {200}  # the new one has it too
        assert ask(clients[0], "POST", f"{base}/unregister")[0] == 200
        assert {ask(client, *infer)[0] for client in clients} == {400}


def test_a_region_that_does_not_exist_is_refused_as_by_one_process(server: Process) -> None:
    body = json.dumps({"key": "/nothing-here", "byte_size": 64}).encode()
    with connections(server, 1) as (client,):
        status, found = ask(client, "POST", "/v2/systemsharedmemory/region/none/register", body)
        assert status == 400
        assert "cannot be opened" in found["error"]
        assert ask(client, "GET", "/v2/systemsharedmemory/status") == (200, [])


def test_a_log_line_names_its_worker(server: Process) -> None:
    with connections(server) as clients:
        found = {ask(each, "POST", "/v2/models/m/infer", request(POISON))[0] for each in clients}
        assert found == {500}

    def named() -> bool:
        lines = [line for line in server.log_lines() if "RuntimeError" in line]
        return {line.rpartition(" ")[2] for line in lines} == {"worker=1", "worker=2"}

    until(named)


def test_each_worker_may_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    """A soft limit of 1024, as many systems have, limited the connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))

    with Process(tmp_path, *TWO, before=limit) as server:
        until(lambda: b"process_max_fds" in server.ask("GET", "/metrics")[2])
        assert server.gauge("process_max_fds") == 2 * min(hard, 1 << 14)


def test_a_killed_worker_is_replaced_and_loses_only_its_own_connections(tmp_path: Path) -> None:
    with Process(tmp_path, *TWO, env={"FAULT_LATENCY_S": "0.002"}) as server:
        victim, other = workers(server)
        with Clients(server.port, 12) as clients:
            until(lambda: len(clients.outcomes) > 200)
            before = server.gauge("deploykit_requests_total")
            lost = sockets(victim)
            kill(server, victim)
            until(lambda: len(workers(server)) == 2 and server.gauge("deploykit_workers") == 2)
            seen = len(clients.outcomes)
            until(lambda: len(clients.outcomes) > seen + 200)
            counts = clients.stop()
        assert counts.keys() <= {200, BROKEN}
        assert counts[BROKEN] <= lost  # each connection of the dead worker broke once
        assert other in workers(server)
        assert server.gauge("deploykit_requests_total") >= before  # counters never decrease
        assert any("worker 1 was ended by SIGKILL" in line for line in server.log_lines())
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("workers_", "number", "to_all"),
    [
        ("2", signal.SIGTERM, False),
        ("2", signal.SIGHUP, True),  # a terminal that closes sends it to all
        ("shared:2", signal.SIGTERM, True),  # as `timeout` does
    ],
)
def test_a_signal_to_end_under_load_loses_nothing(
    tmp_path: Path, workers_: str, number: signal.Signals, to_all: bool
) -> None:
    default: Callable[[], object] = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    options = ("--workers", workers_)
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
        assert not any("not answered" in line for line in server.log_lines())


def is_ending(server: Process) -> bool:
    """Whether the server has seen a signal; soon after that its port is closed."""
    try:
        return server.status("/v2/health/ready") == 503
    except ConnectionRefusedError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_all_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with Process(tmp_path, *TWO, env={"FAULT_ECHO_S": "0.05"}) as server:
        pids = workers(server)
        with connections(server, 4) as clients:
            for client in clients:
                client.request("POST", "/v2/models/m/infer", request(HANG))
            until(lambda: server.gauge("deploykit_requests_in_flight") == 4)
            server.popen.send_signal(number)
            until(lambda: is_ending(server))
            time.sleep(0.1)
            server.popen.send_signal(number)
            assert server.wait() == 130
        until(lambda: not any(map(is_running, pids)))


def test_an_engine_that_hangs_in_one_worker_makes_the_server_not_ready(tmp_path: Path) -> None:
    with Process(tmp_path, *TWO, "--timeout-ms", "200") as server:
        assert server.infer(HANG)[0] == 504
        with connections(server) as clients:

            def states() -> set[int]:
                return {ask(client, "GET", "/v2/health/ready")[0] for client in clients}

            assert len(clients) == MANY
            until(lambda: states() == {503})
        assert server.gauge("deploykit_engines_hung") == 1


def test_a_worker_that_hangs_is_replaced_and_the_others_report_meanwhile(tmp_path: Path) -> None:
    env = {"FAULT_MISSED": "3", "FAULT_EVERY_US": "300000"}
    with Process(tmp_path, *TWO, env=env) as server, connections(server) as found:
        assert {ask(client, "GET", "/v2/health/live")[0] for client in found} == {200}
        stopped, other = workers(server)
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: len(workers(server)) == 2 and stopped not in workers(server))
        assert other in workers(server)
        assert any("worker 1 does not answer" in line for line in server.log_lines())
        until(lambda: server.gauge("deploykit_workers") == 2)


def test_large_weights_are_in_memory_once(tmp_path: Path) -> None:
    """Those of a replacing file and of a worker that is started later, too; a stop removes them."""

    def mapped() -> list[set[str]]:
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in workers(server)]
        return [
            set(re.findall(rf"{tmp_path}/deploykit-weights-\S+/weights", each)) for each in maps
        ]

    path = write_model(tmp_path / "m.onnx")
    env = {"TMPDIR": str(tmp_path)}
    with Process(tmp_path, *TWO, command=REAL, engine=f"m={path}", env=env) as server:
        one, two = mapped()
        assert one == two
        assert len(one) == 1
        replace(write_model(tmp_path / "new.onnx", seed=1), path)
        until(lambda: server.gauge("deploykit_model_generation") == 2)
        until(lambda: mapped()[0] == mapped()[1] != one)
        kill(server, workers(server)[0])
        until(lambda: len(workers(server)) == 2 and mapped()[0] == mapped()[1] != one)
        assert list(tmp_path.glob("deploykit-weights-*"))
        server.popen.terminate()
        server.popen.wait(LIMIT_S)
    assert not list(tmp_path.glob("deploykit-weights-*"))


# -- starts that fail


def refused(folder: Path, *options: str, **env: str) -> tuple[int, str]:
    """The exit code and stderr of a server that cannot start."""
    command = [*STAND_IN, "serve", "m=stand-in", "--http-port", "0", "--grpc-port=none", *options]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "x", "10000", "", "1.5", "²", "999999999999", "shared:", "shared:0", "shared:x"],
)
def test_a_number_of_workers_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=re.escape(f"`workers` {text}: must be a number from 1 to")):
        parse_workers(text)


def test_the_command_line_names_its_flag(tmp_path: Path) -> None:
    code, text = refused(tmp_path, "--workers", "0")
    assert (code, text.splitlines()) == (
        2,
        [
            "error: --workers 0: must be a number from 1 to 256, shared:N or auto",
            "hint: shared:2 are two, and one more process that runs the engines for both",
        ],
    )


def test_a_port_that_another_server_shares_among_its_workers_is_in_use(
    server: Process, tmp_path: Path
) -> None:
    code, text = refused(tmp_path, *TWO, "--http-port", str(server.port))
    assert code == 2
    assert f"--http-port {server.port}: already in use on 127.0.0.1" in text


@pytest.mark.parametrize("count", [0, 1])
def test_a_worker_that_cannot_open_the_model_ends_the_start(tmp_path: Path, count: int) -> None:
    code, text = refused(tmp_path, *TWO, FAULT_OPENS=str(count))
    assert code == 2
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    assert errors == ["error: m.onnx: cannot be opened once more"]


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
    files = {"m": model(tmp_path / "m.onnx", 1.0)}
    timed = time_threads(files, "cpu", 2, lambda *_: None)
    assert isinstance(timed, dict)
    assert min(timed["m"]) > 0


def test_the_engines_of_a_gpu_run_in_one_process(tmp_path: Path) -> None:
    files = {"m": model(tmp_path / "m.onnx", 1.0)}
    plan = tmp_path / "m.trt"
    plan.write_bytes(b"ptrt" + bytes(64))

    def chosen(device: str, workers: int | str, files: dict[str, Path] = files) -> Workers:
        return choose_workers(files, ServeOptions(device=device, workers=workers))

    shared = Workers(2, shared=True)
    assert chosen("cuda", 2) == chosen("auto", 2, {"t": plan}) == shared
    assert chosen("cpu", 2) == Workers(2)
    assert chosen("cpu", "shared:2") == shared
    assert chosen("cuda", "auto") == chosen("cuda", 1) == Workers(1)
    with pytest.raises(Unsupported, match="model 'm' runs on cuda:0") as caught:
        check_on_cpu("m", "cuda:0")
    assert "shared:2" in (caught.value.hint or "")


def test_workers_with_engines_divide_the_threads_and_others_leave_them_to_one() -> None:
    cores = usable_cores()
    assert threads_each(ServeOptions(), Workers(cores)) in (1, None)
    assert threads_each(ServeOptions(), Workers(cores, shared=True)) is None
    assert threads_each(ServeOptions(threads=3), Workers(2)) == 3


def test_workers_that_all_die_and_cannot_start_again_end_the_server(tmp_path: Path) -> None:
    with Process(tmp_path, *TWO, env={"FAULT_OPENS": "2", "FAULT_DELAY_S": "0.01"}) as server:
        for pid in workers(server):
            os.kill(pid, signal.SIGKILL)
        assert server.wait() == 2
        assert "error: m.onnx: cannot be opened once more" in server.log_lines()
        assert any("no worker is left" in line for line in server.log_lines())


# -- A model's file that is replaced under several workers: in use in all, or in none and reported


def test_a_wrong_file_is_reported_once_and_the_next_right_one_is_in_use_everywhere(
    tmp_path: Path,
) -> None:
    path = model(tmp_path / "m.onnx", 1.0)

    def facts(client: HTTPConnection) -> tuple[str, str]:
        found = ask(client, "GET", "/v2/models/m")[1]["parameters"]
        return found["notes"].partition(" of one engine")[0], found["generation"]

    def answer(client: HTTPConnection) -> float:
        status, found = ask(client, "POST", "/v2/models/m/infer", request(1.0))
        assert status == 200, found
        return found["outputs"][0]["data"][0]

    with (
        Process(tmp_path, "--workers", "2", command=REAL, engine=f"m={path}") as server,
        connections(server) as clients,
    ):
        replace(model(tmp_path / "new.onnx", 1.0, width=5), path)
        until(lambda: {facts(each) for each in clients} == {("the inputs", "1")})
        assert {answer(each) for each in clients} == {2.0}
        replace(model(tmp_path / "new.onnx", 2.0), path)
        until(lambda: {facts(each) for each in clients} == {("", "2")})
        assert {answer(each) for each in clients} == {3.0}
        server.popen.terminate()
        assert server.wait() == 0
    stages = ("was rejected, the previous engine stays in use", "was replaced and is in use")
    for stage in stages:
        assert len([line for line in server.log_lines() if stage in line]) == 1
