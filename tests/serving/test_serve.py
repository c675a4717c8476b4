"""`serve` with the options that compose rooms: fallback, shadow, reload, buckets, tokens."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import deploykit as dk
from deploykit.serving import server as http
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import serve_until_stopped
from tests.support.onnx_zoo import linear, mnist_like, save

pytest.importorskip("onnxruntime")
WAIT_S = 60  # against hanging


class Served:
    """A server in a thread of this process."""

    def __init__(self, address: str, server: http.Server) -> None:
        self.address = address
        self.server = server

    def get(self, target: str, token: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"http://{self.address}{target}", headers=headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            text = reply.read().decode()
        return json.loads(text) if text[0] in "[{" else text

    def infer(self, name: str, array: np.ndarray) -> list[float]:
        (spec,) = self.get(f"/v2/models/{name}")["inputs"]
        item = {
            "name": spec["name"],
            "datatype": spec["datatype"],
            "shape": array.shape,
            "data": array.ravel().tolist(),
        }
        body = json.dumps({"inputs": [item]}).encode()
        request = urllib.request.Request(f"http://{self.address}/v2/models/{name}/infer", body)
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return json.loads(reply.read())["outputs"][0]["data"]

    def until(self, reached: Callable[[], Any]) -> Any:
        """Look again and again; what the server does, it does on threads of its own."""
        ticking = threading.Event()
        for _ in range(WAIT_S * 50):
            if found := reached():
                return found
            ticking.wait(0.02)
        raise AssertionError("it never happened")


Serving = Callable[..., Any]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    made: list[http.Server] = []
    original = http.Server

    def make(*arguments: Any, **more: Any) -> http.Server:
        made.append(original(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(http, "Server", make)

    @contextmanager
    def serve(*engines: str, **options: Any) -> Iterator[Served]:
        ready, address, failed = threading.Event(), [], []

        def on_start(
            _server: http.Server, host: str, port: int, _grpc: int | None, _names: list[str]
        ) -> None:
            address.append(f"{host}:{port}")
            ready.set()

        def run() -> None:
            try:
                chosen = ServeOptions(engines, grpc_port=None, **options)
                serve_until_stopped(chosen, on_start=on_start)
            except BaseException as exc:
                failed.append(exc)
                raise
            finally:
                ready.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(WAIT_S)
        assert not failed
        try:
            yield Served(address[0], made[-1])
        finally:
            made[-1].stop()
            thread.join(WAIT_S)
            assert not thread.is_alive()

    return serve


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


def test_a_missing_gpu_is_an_error_unless_the_cpu_was_allowed(
    serving: Serving, model: Path
) -> None:
    from deploykit.engines.onnxruntime.engine import providers

    if "CUDAExecutionProvider" in providers():
        pytest.skip("a CUDA provider is here")
    with pytest.raises(dk.Unsupported):
        dk.serve(model, device="cuda")
    with serving(f"m={model}", device="cuda", cpu_fallback=True) as served:
        said = "runs on the CPU, not on cuda"
        parameters = served.get("/v2/models/m")["parameters"]
        assert parameters["device"] == "cpu"
        assert said in parameters["notes"]
        assert said in served.get("/status")["models"][0]["notes"][0]
        assert 'deploykit_model_notes{model="m",version="1"} 1.0' in served.get("/metrics")
        assert len(served.infer("m", np.zeros((1, 1, 28, 28), np.float32))) == 10


def test_disagreements_of_a_shadow_are_in_the_metrics(
    serving: Serving, model: Path, tmp_path: Path
) -> None:
    import onnx

    other = mnist_like()
    for tensor in other.graph.initializer:
        if len(tensor.dims) == 1:
            values = onnx.numpy_helper.to_array(tensor)[::-1] * 9
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.copy(), tensor.name))
    shadow = save(other, tmp_path / "other.onnx")
    with serving(str(model), shadows=[str(shadow)]) as served:
        served.infer("model", np.ones((2, 1, 28, 28), np.float32))
        name = 'deploykit_shadow_total{model="model",version="1"} 2.0'
        text = served.until(lambda: found if name in (found := served.get("/metrics")) else None)
        assert 'deploykit_shadow_disagreements_total{model="model",version="1"} 2.0' in text


def test_a_request_without_the_token_is_refused(
    serving: Serving, model: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "token"
    secret.write_text("a-long-enough-secret\nmore\n")
    with serving(f"m={model}", token_file=secret) as served:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            served.get("/v2/models/m")
        assert served.get("/v2/models/m", "a-long-enough-secret")["name"] == "m"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shadows": ["x=MODEL"]}, "no such model"),
        ({"shadows": ["MODEL", "MODEL"]}, "given twice"),
        ({"buckets": ["T"]}, "AXIS=16,32,64"),
        ({"buckets": ["Q=16"]}, "no served model has an input with that axis"),
        ({"buckets": ["T=8:x"]}, "INPUT=VALUE"),
        ({"buckets": ["T=8:x=y"]}, "INPUT=VALUE"),
        ({"buckets": ["T=8:x=1,x=2"]}, "each name once"),
        ({"buckets": ["T=8", "T=16"]}, "each name once"),
        ({"pad": {"image": 1}}, "`pad` has no effect without `buckets`"),
        ({"instances": 0}, "`instances` 0"),
        ({"token_file": Path("/nonexistent")}, "/nonexistent"),
        ({"token_file": "EMPTY"}, "at least 16"),
        ({"token_file": "SHORT"}, "at least 16"),
        ({"log_format": "xml"}, "`log_format` xml"),
        ({"tls_cert": Path("x.pem")}, "must be given together"),
        ({"otlp": "x"}, "`otlp` x"),
    ],
    ids=str,
)
def test_contradictory_serve_options_are_refused(
    model: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    options = dict(options)
    files = {"EMPTY": "\n", "SHORT": "abc\n"}
    if options.get("token_file") in files:
        path = tmp_path / "token"
        path.write_text(files[options["token_file"]])
        options = {"token_file": path}
    if "shadows" in options:
        shadows = [text.replace("MODEL", str(model)) for text in options["shadows"]]
        options = {**options, "shadows": shadows}
    log_format = options.pop("log_format", "text")
    with pytest.raises(dk.BadInput, match=said):
        serve_until_stopped(ServeOptions([str(model)], **options), log_format=log_format)


@pytest.mark.parametrize("file", ["My Model (1).onnx", "modèle.onnx", "epoch=3-loss=0.1.onnx"])
def test_a_file_with_any_name_is_served_under_a_valid_one(
    serving: Serving, model: Path, file: str
) -> None:
    path = model.rename(model.with_name(file))
    with pytest.raises(dk.BadInput, match="cannot be the name of a model") as caught:
        dk.serve(path)
    assert caught.value.hint.endswith(f"NAME={path}")
    with serving(f"m={path}") as served:
        assert served.get("/v2/models/m")["name"] == "m"


@pytest.mark.parametrize("name", ["nope", "IDS", "fixed"])
def test_padding_of_an_input_that_is_not_padded_is_refused(tmp_path: Path, name: str) -> None:
    model = save(two_inputs(), tmp_path / "two.onnx")
    options = ServeOptions([str(model)], buckets=[f"T=8:ids=0,{name}=1"])
    with pytest.raises(dk.BadInput, match=f"`pad` {name}: no served model") as caught:
        serve_until_stopped(options)
    assert caught.value.hint == "the padded inputs are: ids"


def two_inputs() -> onnx.ModelProto:
    return onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        g (float[N,T] ids, float[N,1] fixed) => (float[N,T] y) { y = Add(ids, fixed) }
    """)


def test_a_shadow_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = save(linear(), tmp_path / "linear.onnx")
    with pytest.raises(dk.BadInput, match="the shadow's inputs"):
        dk.serve(model, shadows={"model": other})


def test_a_server_in_a_thread_answers_until_it_is_closed(model: Path) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with dk.serve({"digits": str(model)}) as server:
        assert server.models == ("digits",)
        assert server.grpc_url is not None
        with urllib.request.urlopen(f"{server.url}/v2/models/digits", timeout=WAIT_S) as reply:
            assert json.loads(reply.read())["name"] == "digits"
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert server.close() == 0
    assert "closed" in repr(server)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=WAIT_S)


def test_a_forked_process_does_not_close_the_server_of_its_parent(model: Path) -> None:
    with dk.serve(model, grpc_port=None) as server:
        pid = os.fork()
        if pid == 0:
            os._exit(server.close())
        assert os.waitpid(pid, 0)[1] == 0
        with urllib.request.urlopen(f"{server.url}/v2/health/live", timeout=WAIT_S) as reply:
            assert reply.status == 200


def test_two_servers_run_in_one_process(model: Path) -> None:
    with dk.serve(model, grpc_port=None) as first, dk.serve([model], grpc_port=None) as second:
        assert first.url != second.url
        assert first.grpc_url is None


def test_a_server_that_cannot_start_raises_in_the_callers_thread(tmp_path: Path) -> None:
    with pytest.raises(dk.NotFound):
        dk.serve(tmp_path / "absent.onnx")
    with pytest.raises(dk.BadInput, match="no engine to serve"):
        dk.serve([])


def test_serving_from_python_does_not_configure_logging(model: Path) -> None:
    before = list(logging.getLogger().handlers)
    with dk.serve(model, grpc_port=None):
        assert logging.getLogger().handlers == before
