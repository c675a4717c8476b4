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
