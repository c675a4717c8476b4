"""`dk.serve` and the options that compose rooms: fallback, shadow, buckets, tokens, workers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest

import deploykit as dk
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import serve_until_stopped
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, mnist_like, save
from tests.support.runtimes.large_model import write_model
from tests.support.serving.faults import LIMIT_S, ROOT, is_running, until
from tests.support.serving.running import infer_json

needs("onnxruntime")

TOKEN = "a-long-enough-secret"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


def read(address: str, body: bytes | None = None, token: str = TOKEN) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(address, body, headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        text = reply.read().decode()
    return json.loads(text) if text[0] in "[{" else text


def infer(server: dk.RunningServer, rows: int) -> list[float]:
    shape = [rows, 1, 28, 28]
    body = infer_json([1] * (rows * 784), shape).replace(b'"x"', b'"image"')
    reply = read(f"{server.url}/v2/models/m/infer", body)
    found: list[float] = reply["outputs"][0]["data"]
    return found


def test_a_missing_gpu_is_an_error_unless_the_cpu_was_allowed(model: Path) -> None:
    from deploykit.engines.onnxruntime.engine import providers

    if "CUDAExecutionProvider" in providers():
        pytest.skip("a CUDA provider is here")
    with pytest.raises(dk.Unsupported):
        dk.serve(model, device="cuda")
    with dk.serve({"m": model}, device="cuda", cpu_fallback=True) as server:
        parameters = read(f"{server.url}/v2/models/m")["parameters"]
        assert parameters["device"] == "cpu"
        assert "runs on the CPU, not on cuda" in parameters["notes"]
        (figures,) = read(f"{server.url}/status")["models"]
        assert "runs on the CPU, not on cuda" in figures["notes"][0]
        metrics = read(f"{server.url}/metrics")
        assert 'deploykit_model_notes{model="m",version="1"} 1.0' in metrics
        assert len(infer(server, 1)) == 10


def test_disagreements_of_a_shadow_are_in_the_metrics(model: Path, tmp_path: Path) -> None:
    other = mnist_like()
    for tensor in other.graph.initializer:
        if len(tensor.dims) == 1:
            values = onnx.numpy_helper.to_array(tensor)[::-1] * 9
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.copy(), tensor.name))
    shadow = save(other, tmp_path / "other.onnx")
    with dk.serve({"m": model}, shadows={"m": shadow}) as server:
        infer(server, 2)
        labels = '{model="m",version="1"} 2.0'
        until(lambda: f"deploykit_shadow_total{labels}" in read(f"{server.url}/metrics"))
        assert f"deploykit_shadow_disagreements_total{labels}" in read(f"{server.url}/metrics")


TWO_INPUTS = """
    <ir_version: 9, opset_import: ["" : 17]>
    g (float[N,T] ids, float[N,1] fixed) => (float[N,T] y) { y = Add(ids, fixed) }
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": []}, "no engine to serve"),
        ({"shadows": ["x=MODEL"]}, "must be NAME=FILE"),
        ({"shadows": ["MODEL", "MODEL"]}, "once for each NAME"),
        ({"models": ["MODEL", "b=MODEL"], "shadows": ["MODEL"]}, "must be NAME=FILE"),
        ({"shadows": ["linear.onnx"]}, "the shadow's inputs"),
        ({"buckets": ["T"]}, "AXIS=16,32,64"),
        ({"buckets": ["Q=16"]}, "no served model has an input with that axis"),
        ({"buckets": ["T=8:x"]}, "INPUT=VALUE"),
        ({"buckets": ["T=8:x=1,x=2"]}, "each name once"),
        ({"buckets": ["T=8", "T=16"]}, "each name once"),
        *(
            ({"models": ["two.onnx"], "buckets": [f"T=8:ids=0,{name}=1"]}, f"`pad` {name}: no ser")
            for name in ("nope", "IDS", "fixed")
        ),
        ({"pad": {"image": 1}}, "`pad` has no effect without `buckets`"),
        ({"instances": 0}, "`instances` 0"),
        *(
            ({"workers": text}, f"`workers` {text}: must be a number from 1 to 256, shared:N")
            for text in (0, -1, "x", "", "1.5", "²", "999999999999", "shared:0")
        ),
        ({"token_file": "/nonexistent"}, "/nonexistent"),
        ({"token_file": "short"}, "at least 16"),
        ({"log_format": "xml"}, "`log_format` xml"),
        ({"tls_cert": Path("x.pem")}, "must be given together"),
        ({"otlp": "x"}, "`otlp` x"),
    ],
    ids=str,
)
def test_contradictory_serve_options_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(model.parent)
    Path("short").write_text("abc\n")
    save(linear(), Path("linear.onnx"))
    save(onnx.parser.parse_model(TWO_INPUTS), Path("two.onnx"))
    chosen = {"models": [str(model)], **options}
    log_format = chosen.pop("log_format", "text")
    for kind in chosen.keys() & {"models", "shadows"}:
        chosen[kind] = [text.replace("MODEL", str(model)) for text in chosen[kind]]
    with pytest.raises(dk.BadInput, match=words):
        serve_until_stopped(ServeOptions(**chosen), log_format=log_format)


@pytest.mark.parametrize("file", ["My Model (1).onnx", "modèle.onnx", "epoch=3-loss=0.1.onnx"])
def test_a_file_with_any_name_is_served_under_a_valid_one(model: Path, file: str) -> None:
    path = model.rename(model.with_name(file))
    with pytest.raises(dk.BadInput, match="cannot be the name of a model") as caught:
        dk.serve(path)
    assert "of 1 to 128 letters" in caught.value.hint
    assert caught.value.hint.endswith(f"NAME={path}")
    with dk.serve(f"m={path}") as server:
        assert server.models == ("m",)


@pytest.mark.parametrize("kind", ["models", "pipelines"])
@pytest.mark.parametrize("name", ["", "a/b", "..", "stats", " ", "é", "a" * 129, "a\n"])
def test_a_name_that_could_be_a_path_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    file = tmp_path / "steps.py"
    file.write_text("def greet(x: str) -> str:\n    return x\n")
    with pytest.raises(dk.BadInput, match="cannot be the name of a model"):
        dk.serve(**{kind: {name: file}})


@pytest.mark.parametrize("name", ["resnet-18_v1.5", "..m", "a" * 128])
def test_any_other_name_is_taken(model: Path, name: str) -> None:
    with dk.serve({name: model}) as server:
        assert server.models == (name,)


def test_a_server_in_a_thread_answers_until_it_is_closed(model: Path, tmp_path: Path) -> None:
    """It changes neither signals nor logging; a fork does not close it; another one runs too."""

    def settings() -> Any:
        signals = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        return signals, list(logging.getLogger().handlers)

    before, token = settings(), tmp_path / "token"
    token.write_text(f"{TOKEN}\nmore\n")
    with (
        dk.serve({"m": str(model)}, token_file=token) as server,
        dk.serve([model], grpc_port=None) as second,
    ):
        assert (server.models, second.grpc_url) == (("m",), None)
        assert server.url != second.url
        assert server.grpc_url is not None
        pid = os.fork()
        if pid == 0:
            os._exit(server.close())
        assert os.waitpid(pid, 0)[1] == 0
        assert read(f"{server.url}/v2/models/m")["name"] == "m"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            read(f"{server.url}/v2/models/m", token="another one of that length")
        assert settings() == before
    assert server.close() == 0
    assert "closed" in repr(server)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=LIMIT_S)


def test_a_server_that_cannot_start_raises_in_the_callers_thread(tmp_path: Path) -> None:
    with pytest.raises(dk.NotFound):
        dk.serve(tmp_path / "absent.onnx")
    with pytest.raises(dk.DeploykitError, match="stopped before it was ready"):
        dk.RunningServer(lambda *_: 0, ServeOptions())


def test_serving_an_onnx_file_imports_neither_torch_nor_onnx() -> None:
    program = (
        "import sys, deploykit.serving.server, deploykit.engines.onnxruntime.engine\n"
        "heavy = {'torch', 'onnx', 'typer', 'sklearn', 'onnxscript', 'tritonclient'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- Several processes, of a user's program


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in map(int, each.read_text().split()):
                found |= {child, *descendants(child)}
    return found


def test_several_processes_answer_until_the_server_is_closed(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = descendants(os.getpid())
    with dk.serve({"m": model}, workers=2) as server:
        started = descendants(os.getpid()) - before
        assert len(started) == 3  # the workers and their parent
        assert server.models == ("m",)
        assert server.grpc_url is not None
        assert read(f"{server.url}/status")["workers"]["serving"] == 2
    assert not any(map(is_running, started))
    assert "closed" in repr(server)
    assert server.close() == 0
    assert capfd.readouterr().err == ""  # as this process, they log warnings alone


def test_errors_are_those_of_one_process(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = {"http_port": taken.getsockname()[1]}
        for options in (port, {"buckets": {"Q": (16,)}}):
            errors = []
            for workers in (1, 2):
                with pytest.raises(dk.BadInput) as caught:
                    dk.serve(model, workers=workers, **options)
                errors.append((caught.value.message, caught.value.hint))
            assert errors[0] == errors[1]


PROGRAM = """
import sys
import deploykit as dk

with dk.serve(sys.argv[1], workers=2, grpc_port=None) as server:
    print(server.url, flush=True)
    server.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_end_with_the_program_and_leave_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C reaches all processes of a terminal; kill -9 the program alone."""
    path = write_model(tmp_path / "large.onnx")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline().startswith("http://")
    assert list(tmp_path.glob("deploykit-weights-*"))
    started = descendants(program.pid)
    assert len(started) == 3
    (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
    _, errors = program.communicate(timeout=LIMIT_S)
    if number == signal.SIGINT:  # Python's own message, of the program alone
        lines = [line for line in errors.splitlines() if line[:1] != " "]
        assert [line for line in lines if "workers share" not in line] == [  # on one core
            "Traceback (most recent call last):",
            "KeyboardInterrupt",
        ]
    until(lambda: not any(map(is_running, started)))
    assert [each.name for each in tmp_path.iterdir()] == ["large.onnx"]
    assert program.returncode == -number


def test_ctrl_c_while_it_is_waited_for_does_not_end_the_wait_of_close() -> None:
    """Python before 3.12 takes a thread whose `join` was interrupted for ended."""
    main_thread, waits, ended = threading.main_thread().ident, threading.Event(), threading.Event()

    def run(on_start: Any, stop: socket.socket) -> int:
        on_start(None, "localhost", 1, None, ["m"])
        waits.wait(LIMIT_S)
        threading.Event().wait(0.2)
        signal.pthread_kill(main_thread or 0, signal.SIGINT)
        stop.recv(1)  # until it is to stop
        threading.Event().wait(0.2)
        ended.set()
        return 0

    def wait() -> None:
        waits.set()
        server.wait()

    server = dk.RunningServer(run, ServeOptions())
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert server.close() == 0
    assert ended.is_set()


def test_ctrl_c_while_it_starts_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Future[int]):
        def result(self, timeout: float | None = None) -> int:  # noqa: ARG002
            raise KeyboardInterrupt

    monkeypatch.setattr("deploykit.serving.serve.Future", Interrupted)
    ended = threading.Event()

    def run(_on_start: object, stop: socket.socket) -> int:
        assert stop.recv(1) == b""
        ended.set()
        return 0

    with pytest.raises(KeyboardInterrupt):
        dk.RunningServer(run, ServeOptions())
    assert ended.wait(LIMIT_S)
