"""The page at /docs, whose examples are run unchanged, and /openapi.json."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import TensorSpec
from deploykit.evaluation.verify import open_proven
from deploykit.serving.oip.request import signature
from deploykit.serving.web.page import Address, _of_tensors, openapi
from tests.support.campaign import rounds
from tests.support.fake_engine import FakeEngine
from tests.support.installed import needs
from tests.support.serving.running import Running, running
from tests.support.serving.task_models import write_task_model

needs("PIL", "schemathesis", "tritonclient")
TOKEN = "a token of some length"


class Echo(FakeEngine):
    """Returns its inputs, under their names with an underscore."""

    def __init__(self, *specs: TensorSpec) -> None:
        super().__init__()
        self.inputs = specs
        self.outputs = tuple(TensorSpec(f"{s.name}_", s.dtype, s.shape) for s in specs)

    def __call__(self, feeds):
        return {f"{name}_": np.array(array) for name, array in feeds.items()}


def examples(server: Running, **headers: str) -> dict[str, str]:
    """The code of each example by its title."""
    reply = server.ask("GET", "/docs", Host=f"127.0.0.1:{server.port}", **headers)
    assert reply.status == 200
    assert not re.search(rb"<(img|iframe|image)", reply.body)
    assert re.findall(rb"<script[^>]*>", reply.body) == [b'<script type="module" src="docs.js">']
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


CASES = {
    "image": (
        [TensorSpec("it's an <image>", "uint8", ("N", 3, 5, 5)), TensorSpec("on", "bool", ("N",))],
        ["tritonclient"],
    ),
    "string": (
        [TensorSpec("t", "string", ("N", 2)), TensorSpec("x", "float32", ("N", 2))],
        ["curl", "tritonclient"],
    ),
    "half": (
        [TensorSpec("h", "float16", ("N", 2)), TensorSpec("b", "bfloat16", ("N", 2))],
        ["tritonclient"],
    ),
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
        assert "gRPC" not in found["tritonclient"]
        assert '"shape": [1, 4], "data": [1, 1, 1, 1]' in found["curl"]
        assert '"data":[3.0,3.0,3.0,3.0]' in execute("curl", found["curl"], tmp_path)


def test_the_values_of_a_large_input_are_not_made_to_be_left_out() -> None:
    large = TensorSpec("x", "float32", (1 << 60,))  # no list is that long
    model: Any = SimpleNamespace(name="m", signature=signature([large], [], 0, 1))
    tensors = [(model.signature.inputs["x"], [1 << 60])]
    assert list(_of_tensors(model, tensors, Address("http", "h", None, False))) == ["tritonclient"]


def test_the_status_shows_a_models_file_and_the_guide_its_task(tmp_path: Path) -> None:
    file = write_task_model(tmp_path, "classify")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (engine,) = open_proven(file, threads=1)
    with engine, running({"a": FakeEngine(), "b": engine}) as server:
        facts = server.ask("GET", "/status").json["models"][1]["file"]
        guide = server.ask("GET", "/docs", Host="localhost:80").body.decode()
    assert (facts["name"], facts["sha256"]) == (file.name, digest)
    assert facts["bytes"] == file.stat().st_size
    assert "task: classify" in guide
    assert "curl http://localhost:80/v2/models/b/predict -F image=@photo.jpg" in guide


# -- the OpenAPI document, tested by schemathesis against a real server


# A request may have a timeout of one microsecond, which then expires.
CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501, 504]

# The document is the same for all models: which names and shapes fit is for /v2/models/NAME to say.
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 404, 413, 415, 501, 504]
"""
# In JSON Schema 1.0 is an integer; the server refuses it as a float.
HOOKS = """
import schemathesis

def to_integer(value):
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, list):
        return [to_integer(each) for each in value]
    if isinstance(value, dict):
        return {key: to_integer(each) for key, each in value.items()}
    return value

@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if path_parameters and "model" in path_parameters:
        path_parameters["model"] = "several"
    return path_parameters

@schemathesis.hook
def map_body(context, body):
    return to_integer(body)
"""


def test_schemathesis_finds_no_violation_of_the_document(tmp_path: Path) -> None:
    config, hooks = tmp_path / "schemathesis.toml", tmp_path / "hooks.py"
    hooks.write_text(HOOKS)
    config.write_text(f'hooks = "{hooks}"\n{CONFIG}')
    several = Echo(*CASES["string"][0], TensorSpec("flag", "bool", ("N", 1)))
    with running({"several": several}) as server:
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            f"--config-file={config}",
            "run",
            f"http://127.0.0.1:{server.port}/openapi.json",
            "--seed=1",
            f"--max-examples={rounds(3, 200)}",
            "--phases=examples,coverage,fuzzing",
            "--no-color",
        ]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]


def test_the_document_says_which_routes_need_the_token() -> None:
    token = "0123456789abcdef"
    with running(token=token) as server:
        document = server.ask("GET", "/openapi.json", Authorization=f"Bearer {token}").json
        assert document["security"] == [{}, {"token": []}]
        for path, operations in document["paths"].items():
            get = operations.get("get")
            if get is not None and "{" not in path:
                status = server.ask("GET", path).status
                assert status == (200 if get.get("security") == [] else 401), path


def test_generators_of_clients_find_every_array_and_operation() -> None:
    """An array without `items` made openapi-python-client leave out inference."""

    nodes: list[dict[str, Any]] = []
    document = json.loads(openapi("/models"), object_hook=lambda node: nodes.append(node) or node)
    assert document["servers"] == [{"url": "/models"}]
    assert all("items" in node for node in nodes if node.get("type") == "array")
    paths = [path.items() for path in document["paths"].values()]
    found = [each for path in paths for verb, each in path if verb != "parameters"]
    operations = [each.get("operationId") for each in found]
    assert len(set(operations)) == len(operations)
    assert {"infer", "predict", "live", None} - set(operations) == {None}


def test_a_server_below_a_path_answers_with_and_without_it() -> None:
    """Some proxies pass the path on, some remove it; links are relative to where the page is."""
    with running(root_path="/models/", token="0123456789abcdef") as server:
        assert server.ask("GET", "/models").status == 308
        assert server.ask("GET", "/models/").status == 200
    with running(root_path="/models/") as server:
        for prefix in ("", "/models"):
            assert server.ask("GET", f"{prefix}/v2/health/live").status == 200
            assert server.ask("GET", f"{prefix}/page.js").status == 200
            assert server.ask("GET", f"{prefix}/status").status == 200
        page = server.ask("GET", "/models/").body.decode()
        assert 'src="page.js"' in page
        moved = server.ask("GET", "/models")
        assert (moved.status, moved.headers["location"]) == (308, "/models/")
        guide = server.ask("GET", "/models/docs", Host="localhost:80").body.decode()
        assert "curl http://localhost:80/models/v2/models/m/infer" in guide
        assert server.ask("GET", "/modelsv2").status == 404
