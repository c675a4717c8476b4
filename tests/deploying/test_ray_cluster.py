"""A Ray cluster of two nodes serves a bundle, loses a node, and predicts as one machine does."""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib import request
from urllib.error import HTTPError

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from tests.support import onnx_zoo
from tests.support.campaign import CAMPAIGN

if not CAMPAIGN or importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray and takes two minutes: make ray-test", allow_module_level=True)

import tritonclient.http as client_http

from tests.support.bundling.cluster import SHAPE, TwoNodes, gather_model, slow_bundle, two_nodes

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
CLIENTS = 8


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def port(nodes: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of the proxy of the first node, in front of two replicas on each node."""
    out = slow_bundle(tmp_path_factory.mktemp("bundle"))
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number = int(found.getsockname()[1])
    nodes.serve(out, number, fronts=2, replicas=4, cpus=0.5)
    return number


def ask(client: Any, value: float) -> np.ndarray:
    tensor = client_http.InferInput("x", list(SHAPE), "FP32")
    tensor.set_data_from_numpy(np.full(SHAPE, value, np.float32))
    return np.asarray(client.infer("slow", [tensor]).as_numpy("y"))


def test_tritonclient_is_answered_and_errors_are_the_protocols_own(port: int) -> None:
    client = client_http.InferenceServerClient(f"127.0.0.1:{port}")
    assert client.is_server_ready()
    assert client.get_model_metadata("slow")["inputs"][0]["shape"] == list(SHAPE)
    assert client.get_model_config("slow")["backend"] == "onnxruntime"
    assert ask(client, 2.0).shape == SHAPE
    for path, body, code, words in (
        ("other", None, 404, "there is no model"),
        ("slow/infer", bytes((64 << 20) + 1), 413, "above 67108864 bytes"),
    ):
        with pytest.raises(HTTPError) as caught:
            request.urlopen(f"http://127.0.0.1:{port}/v2/models/{path}", body)
        assert (caught.value.code, words in json.load(caught.value)["error"]) == (code, True)


def test_predictions_are_those_of_one_machine(nodes: TwoNodes, tmp_path: Path) -> None:
    from deploykit.evaluation.predict import predict

    model = onnx_zoo.save(onnx_zoo.conv_relu(), tmp_path / "m.onnx")
    images = np.random.default_rng(1).standard_normal((1003, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=images)
    shown: list[float] = []
    predict(model, tmp_path / "x.npz", tmp_path / "here.npz")
    predict(
        model,
        tmp_path / "x.npz",
        tmp_path / "there.npz",
        on="ray",
        on_progress=lambda _text, share: shown.append(share),
    )
    assert (tmp_path / "here.npz").read_bytes() == (tmp_path / "there.npz").read_bytes()
    assert shown == sorted(shown)
    assert shown[-1] == 1


def test_an_actors_error_is_one_line(nodes: TwoNodes, tmp_path: Path) -> None:
    from deploykit.evaluation.predict import predict

    model = onnx_zoo.save(gather_model(), tmp_path / "ids.onnx")
    np.savez(tmp_path / "ids.npz", ids=np.array([[0, 1], [9, 9]]))
    with pytest.raises(BadInput, match=r"^ids.onnx: .* out of data bounds"):
        predict(model, tmp_path / "ids.npz", tmp_path / "out.npz", on="ray")


def test_a_lost_node_loses_no_request(nodes: TwoNodes, port: int) -> None:
    """Last of this file: the second node stays lost."""
    stop = threading.Event()
    answers: list[float] = []
    failures: list[str] = []
    want = ask(client_http.InferenceServerClient(f"127.0.0.1:{port}"), 1.0)

    def load() -> None:
        client = client_http.InferenceServerClient(f"127.0.0.1:{port}")
        while not stop.is_set():
            try:
                assert np.array_equal(ask(client, 1.0), want)
                answers.append(time.monotonic())
            except Exception as exc:  # noqa: BLE001 - counted
                failures.append(repr(exc))

    threads = [threading.Thread(target=load) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    assert nodes.lose_second() >= 3  # the raylet, a front and replicas
    lost = time.monotonic()
    time.sleep(6)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(at > lost + 2 for at in answers) > CLIENTS  # and it goes on
