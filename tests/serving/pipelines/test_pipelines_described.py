"""What a server says of its pipelines: OpenAPI, examples, the dashboard; and dk.client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.tiles import STEPS, mean_model, page, png, write_pipeline
from tests.support.serving.pipelines import Client, served, write_words

needs("onnxruntime", "PIL", "grpc", "tritonclient")

SAY = "def said(data: bytes) -> bytes:\n    return data[::-1]\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("described")
    (folder / "say.py").write_text(SAY)
    files = [write_pipeline(folder), *write_words(folder), folder / "say.py"]
    with served(*files, grpc_port=0) as client:
        yield client


def test_the_page_has_programs_for_a_pipeline(server: Client, tmp_path: Path) -> None:
    _, text = server.ask("/docs")
    assert "pipeline: crops → colours → answer" in text
    assert f"curl http://{server.place}/v2/models/tiles/predict -F page=@photo.jpg" in text
    program = text[text.rindex("<code>", 0, text.index("tritonclient.grpc")) + 6 :]
    program = program[: program.index("</code>")].replace("&#x27;", "'").replace("&quot;", '"')
    (tmp_path / "photo.jpg").write_bytes(png(page("red")))
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert '["red"]' in ran.stdout


def test_the_dashboard_gets_a_pipeline_as_it_gets_models(server: Client) -> None:
    assert server.predict("tiles", png(page("red"))) == (200, ["red"])
    _, status = server.ask("/status")
    found = {each["name"]: each for each in status["models"]}
    assert next(iter(found)) == "tiles"  # which the page opens with
    tiles, model = found["tiles"], found["tiles.colours"]
    assert model.keys() <= tiles.keys()
    assert tiles["task"] == {
        "stages": "crops, colours, answer", "takes": "image", "gives": "list[str]"
    }  # fmt: skip
    assert tiles["outcomes"]["success"] >= 1
    assert sum(tiles["request"]["counts"]) == tiles["outcomes"]["success"]
    assert list(tiles["stages_us"]) == ["crops", "colours", "answer", "page"]
    assert 0 < sum(tiles["stages_us"].values()) <= tiles["request"]["us"]


def test_the_python_client_asks_a_pipeline_item_by_item(server: Client, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(png(page("blue")))
    with dk.client(f"http://{server.place}") as client:
        assert client.predict([path, png(page("red"))], "tiles") == [["blue"], ["red"]]
        assert client.predict("two words", "words") == {"done": ["two", "words"]}
        assert client.predict(b"abc", "say") == b"cba"
        found = client.predict(json.dumps({"row": [1, 2, 3, 4], "id": "a"}), "echo")
        assert found["id"] == "a"
        with pytest.raises(dk.DeploykitError, match="stage 'slow' failed: ValueError"):
            client.predict("raise", "words")


# -- The models of a served pipeline: shared, reloaded, joined with other requests; and its end


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
