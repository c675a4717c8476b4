"""The page at /docs: each of its examples is run unchanged."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.tensors import TensorSpec
from deploykit.evaluation.verify import open_proven
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import Running, running

pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
TOKEN = "a token of some length"


class Echo(FakeEngine):
    """Returns its inputs, under their names with an underscore."""

    def __init__(self, *specs: TensorSpec) -> None:
        super().__init__()
        self.inputs = specs
        self.outputs = tuple(TensorSpec(f"{s.name}_", s.dtype, s.shape) for s in specs)

    def __call__(self, feeds):
        return {f"{name}_": np.array(array) for name, array in feeds.items()}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def examples(server: Running, **headers: str) -> dict[str, str]:
    """The code of each example by its title."""
    reply = server.ask("GET", "/docs", Host=f"127.0.0.1:{server.port}", **headers)
    assert reply.status == 200
    pattern = r'<h3>(.*?)</h3><pre tabindex="0"><code>(.*?)</code></pre>'
    blocks = re.findall(pattern, reply.body.decode(), re.S)
    return {title: unescape(code) for title, code in blocks}


def execute(title: str, code: str, folder: Path) -> str:
    """Run an example as a reader would; skips where the machine has no such program."""
    file = folder / "main"
    file.write_text(code)
    program = "bash" if title == "curl" else sys.executable
    if title == "curl" and shutil.which("curl") is None:
        pytest.skip("no curl on PATH")
    environment = {**os.environ, "TOKEN": TOKEN}
    command = [program, str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert answer.returncode == 0, f"{title}:\n{code}\n{answer.stderr}"
    return answer.stdout


IMAGE = [
    TensorSpec("it's an <image>", "uint8", ("N", 3, 5, 5)),
    TensorSpec("on", "bool", ("N",)),
]
TEXT = [TensorSpec("t", "string", ("N", 2)), TensorSpec("x", "float32", ("N", 2))]
HALF = [TensorSpec("h", "float16", ("N", 2)), TensorSpec("b", "bfloat16", ("N", 2))]


CASES = {
    "image": (
        IMAGE,
        ["curl", "tritonclient (HTTP)", "tritonclient (gRPC)"],
    ),
    "string": (TEXT, ["curl", "tritonclient (HTTP)", "tritonclient (gRPC)"]),
    "half": (HALF, ["tritonclient (HTTP)", "tritonclient (gRPC)"]),
}


@pytest.fixture(scope="module", params=CASES, ids=CASES)
def shown(request: pytest.FixtureRequest) -> Iterator[tuple[list[TensorSpec], dict[str, str]]]:
    """Each model's inputs and its examples, its server running."""
    specs, titles = CASES[request.param]
    with running({"m": Echo(*specs)}, token=TOKEN, grpc_port=0) as server:
        found = examples(server, Authorization=f"Bearer {TOKEN}")
        assert list(found) == titles
        yield specs, found


def test_every_example_runs_unchanged(
    shown: tuple[list[TensorSpec], dict[str, str]], tmp_path: Path
) -> None:
    specs, found = shown
    for title, code in found.items():
        answer = execute(title, code, tmp_path)
        assert all(f"{spec.name}_" in answer for spec in specs), answer
        assert "text" in answer or "1" in answer


def test_the_curl_example_of_a_small_model_contains_its_data(tmp_path: Path) -> None:
    with running(grpc_port=None) as server:
        found = examples(server)
        assert "tritonclient (gRPC)" not in found
        assert '"shape": [1, 4], "data": [1, 1, 1, 1]' in found["curl"]
        assert '"data":[3.0,3.0,3.0,3.0]' in execute("curl", found["curl"], tmp_path)


def test_the_status_and_the_guide_show_the_model_files_hash(affine_onnx: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    digest = hashlib.sha256(affine_onnx.read_bytes()).hexdigest()
    (engine,) = open_proven(affine_onnx, "cpu")
    with engine, running({"m": engine}) as server:
        facts = server.ask("GET", "/status").json["models"][0]["file"]
        assert facts["name"] == affine_onnx.name
        assert facts["sha256"] == digest
        assert facts["bytes"] == affine_onnx.stat().st_size
        assert digest in server.ask("GET", "/docs").body.decode()


def test_a_hostile_tensor_name_is_escaped_in_the_guide() -> None:
    evil = TensorSpec("<img src=x onerror=alert(1)>", "float32", ("N", 4))
    with running({"m": Echo(evil)}) as server:
        reply = server.ask("GET", "/docs")
        tags = Tags()
        tags.feed(reply.body.decode())
        assert not {"img", "iframe"} & set(tags.found)
        assert re.findall(r"<script[^>]*>", reply.body.decode()) == [
            '<script type="module" src="docs.js">'
        ]
        assert b"&lt;img src=x onerror=alert(1)&gt;" in reply.body
        assert reply.headers["content-security-policy"].startswith("default-src 'self'")
        assert reply.headers["x-content-type-options"] == "nosniff"
