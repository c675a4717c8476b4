"""The models of a served pipeline: shared, reloaded, joined with other requests; and its end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.tiles import STEPS, mean_model, page, png, write_pipeline
from tests.support.serving.pipelines import Client, served

pytest.importorskip("onnxruntime")
pytest.importorskip("PIL")


def test_a_hung_stage_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    path = tmp_path / "hang.py"
    path.write_text(
        "import threading\nlinear = 'linear.onnx'\n"
        "def x(n: int) -> __import__('numpy').ndarray: threading.Event().wait()\n"
    )
    save(linear(), tmp_path / "linear.onnx")
    with served(path, timeout_ms=50) as client:
        assert client.predict("hang", b"1")[0] == 504
        assert client.predict("hang", b"1")[0] == 504
        client.until(lambda: client.ask("/v2/models/hang/ready")[0] == 503)
        _, error = client.ask("/v2/models/hang/ready")
        assert "stage 'x' does not return" in error["error"]


def test_the_model_of_a_pipeline_is_reloaded(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    with served(path) as client:
        body = png(page("red", "blue"))
        assert client.predict("tiles", body) == (200, ["red", "blue"])
        negative = mean_model()
        negative.graph.node[0].output[0] = "positive"
        node = type(negative.graph.node[0])(
            op_type="Neg", name="neg", input=["positive"], output=["mean"]
        )
        negative.graph.node.insert(1, node)
        save(negative, tmp_path / "new.onnx")
        shutil.move(tmp_path / "new.onnx", tmp_path / "mean.onnx")
        client.until(lambda: client.predict("tiles", body)[1] == ["green", "red"])


def test_a_model_that_is_served_already_is_shared(tmp_path: Path) -> None:
    one, two = write_pipeline(tmp_path), write_pipeline(tmp_path, STEPS, "more.py")
    pipelines = {"one": one, "two": two}
    with dk.serve(
        {"mean": tmp_path / "mean.onnx"}, pipelines=pipelines, grpc_port=None, device="cpu"
    ) as server:
        assert server.models == ("mean", "one", "two")
        client = Client(server.url)
        for name in pipelines:
            assert client.predict(name, png(page("blue"))) == (200, ["blue"])
        assert client.metric("nv_inference_count", model="mean") == 2
    with pytest.raises(dk.BadInput, match="'one' is that of a model and of a pipeline"):
        dk.serve({"one": tmp_path / "mean.onnx"}, pipelines={"one": two})


def test_requests_of_a_pipeline_join_those_of_the_model(tmp_path: Path) -> None:
    """The same batcher runs both."""
    item = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.5] * 192}
    body = json.dumps({"inputs": [item]}).encode()
    with served(write_pipeline(tmp_path)) as tiles:
        status, found = tiles.ask("/v2/models/tiles.colours/infer", body)
        assert status == 200
        assert np.allclose(found["outputs"][0]["data"], 0.5)
        assert tiles.predict("tiles", png(page("red")))[0] == 200
        assert tiles.metric("nv_inference_count", model="tiles.colours") == 2
