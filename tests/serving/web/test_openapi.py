"""The OpenAPI document, tested by schemathesis against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.tensors import TensorSpec
from deploykit.evaluation.verify import open_proven
from deploykit.serving.web.page import openapi
from tests.support.campaign import rounds
from tests.support.fake_engine import FakeEngine
from tests.support.installed import needs
from tests.support.serving.running import Running, running
from tests.support.serving.task_models import write_task_model

needs("schemathesis", "PIL")

AXES: dict[str, tuple[str, tuple[int | str, ...]]] = {
    "x": ("float32", ("N", 2)),
    "text": ("string", ("N",)),
    "n": ("int8", ("N", 1)),
    "flag": ("bool", ("N", 1)),
}


class Several(FakeEngine):
    """Returns its inputs, which are of different datatypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = tuple(TensorSpec(name, *found) for name, found in AXES.items())
        self.outputs = tuple(TensorSpec(f"{name}_", *found) for name, found in AXES.items())

    def __call__(self, feeds):
        return {f"{name}_": np.array(array) for name, array in feeds.items()}


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


def fuzz(server: Running, folder: Path, *more: str) -> None:
    """Run schemathesis; it exits with 1 on any failure."""
    config = folder / "schemathesis.toml"
    hooks = folder / "hooks.py"
    hooks.write_text(HOOKS)
    config.write_text(f'hooks = "{hooks}"\n{CONFIG}')
    program = Path(sys.executable).with_name("schemathesis")
    command = [
        str(program),
        f"--config-file={config}",
        "run",
        f"http://127.0.0.1:{server.port}/openapi.json",
        "--seed=1",
        f"--max-examples={rounds(3, 200)}",
        "--phases=examples,coverage,fuzzing",
        "--no-color",
        *more,
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]


def test_schemathesis_finds_no_violation_of_the_document(tmp_path: Path) -> None:
    with running({"several": Several()}) as server:
        fuzz(server, tmp_path)


def test_the_guide_has_programs_for_a_model_that_takes_items(tmp_path: Path) -> None:
    (engine,) = open_proven(write_task_model(tmp_path, "classify"), threads=1)
    with engine, running({"a": FakeEngine(), "b": engine}) as server:
        guide = server.ask("GET", "/docs", Host="localhost:80").body.decode()
    assert "task: classify" in guide
    assert "curl http://localhost:80/v2/models/b/predict -F image=@photo.jpg" in guide


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

    def nodes(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            yield value
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, (dict, list)):
                yield from nodes(each)

    document = json.loads(openapi("/models"))
    assert document["servers"] == [{"url": "/models"}]
    assert all("items" in node for node in nodes(document) if node.get("type") == "array")
    operations = [
        each.get("operationId")
        for path in document["paths"].values()
        for verb, each in path.items()
        if verb != "parameters"
    ]
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
