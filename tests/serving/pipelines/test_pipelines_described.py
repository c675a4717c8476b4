"""What a server says of its pipelines: OpenAPI, examples, the dashboard; and dk.client."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import deploykit as dk
from tests.support.installed import needs
from tests.support.runtimes.tiles import page, png, write_pipeline
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


def test_every_pipeline_has_a_route_in_the_document(server: Client) -> None:
    _, document = server.ask("/openapi.json")
    parameters = document["components"]["parameters"]
    models = ["tiles.colours", "echo.linear"]
    assert parameters["model"]["schema"]["enum"] == models
    names = ["tiles", "words", "echo", "say"]
    assert parameters["served"]["schema"]["enum"] == [*names, *models]
    kinds = {}
    for name in names:
        post = document["paths"][f"/v2/models/{name}/predict"]["post"]
        kinds[name] = set(post["requestBody"]["content"]) - {"multipart/form-data"}
    assert kinds["tiles"] == {"image/jpeg", "image/png", "image/webp"}
    assert kinds["words"] == {"text/plain", "application/json"}
    assert kinds["echo"] == {"application/json"}
    assert kinds["say"] == {"application/octet-stream"}
    answers = document["paths"]["/v2/models/say/predict"]["post"]["responses"]["200"]
    assert list(answers["content"]) == ["application/octet-stream"]


def test_schemathesis_finds_no_violation_of_the_document(server: Client, tmp_path: Path) -> None:
    """Of the routes of the pipeline that answers any bytes, and of those that describe it."""
    needs("schemathesis")
    config = tmp_path / "schemathesis.toml"
    config.write_text("")
    ran = subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), f"--config-file={config}", "run",
         f"http://{server.place}/openapi.json", "--seed=1", "--max-examples=5",
         "--phases=examples,coverage,fuzzing", "--no-color",
         "--include-path=/v2/models/say/predict", "--include-path=/v2/models/{model}/config"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


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
