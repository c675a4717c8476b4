"""A KServe bundle: its manifests fit KServe's and Kubernetes' schemas, and our own server.

`kubernetes.json` holds the schemas: scripts/kubernetes_schemas.py says where they come from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploykit.core.tensors import TensorSpec
from deploykit.deploying import kserve
from deploykit.serving import server
from deploykit.serving.http.routes import Routes
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from tests.support.bundling.contents import contents_of
from tests.support.fake_engine import FakeEngine
from tests.support.serving.scrapes import exposition

SCHEMAS = json.loads(
    (Path(__file__).parents[1] / "support/bundling/kubernetes.json").read_text("utf-8")
)
IMAGE = TensorSpec("image", "float32", ("N", 3, 8, 8))
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def written(folder: Path, **given: Any) -> dict[str, Any]:
    """The manifests by kind."""
    (folder / "out").mkdir()
    kserve.write(folder / "out", contents_of(folder, [IMAGE], **given))
    documents = [
        yaml.safe_load(path.read_text("utf-8")) for path in (folder / "out").glob("*.yaml")
    ]
    return {each.get("kind", "Kustomization"): each for each in documents}


def check(kind: str, document: dict[str, Any]) -> None:
    schema = {"$ref": f"#/definitions/{kind}", "definitions": SCHEMAS["definitions"]}
    import jsonschema  # takes a second

    jsonschema.Draft7Validator(schema).validate(document)


@pytest.mark.parametrize("profile", ["cpu", "l4", "jetson-orin-nano-8gb"])
def test_the_manifests_fit_the_schemas(tmp_path: Path, profile: str) -> None:
    found = written(tmp_path, profile=profile)
    check("V1alpha1ServingRuntime", found["ServingRuntime"])
    check("V1beta1InferenceService", found["InferenceService"])


def container(found: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = found["ServingRuntime"]["spec"]["containers"][0]
    return first


def test_the_probes_ask_routes_that_the_server_has(tmp_path: Path) -> None:
    probes = container(written(tmp_path))
    routes = Routes(ModelRepository({"m": FakeEngine()}, ServeOptions()))
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert probes[kind]["httpGet"]["path"] in routes._table


def test_the_container_starts_as_the_command_line_takes_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from deploykit.cli.main import app

    given = container(written(tmp_path))
    assert given["command"] == ["deploykit"]
    arguments = [str(tmp_path / "out") if a == "/mnt/models" else a for a in given["args"]]
    arguments[arguments.index("/engines")] = str(tmp_path / "engines")
    result = CliRunner().invoke(app, arguments)
    assert "bundle.json" in result.output + str(result.exception)  # `seal` has not written it


def test_the_autoscaling_query_names_metrics_of_the_server(tmp_path: Path) -> None:
    predictor = written(tmp_path)["InferenceService"]["spec"]["predictor"]
    query = predictor["autoScaling"]["metrics"][0]["external"]["metric"]["query"]
    repository = ModelRepository({"m": FakeEngine()}, ServeOptions())
    text = exposition(repository.samples())[0].decode()
    names = re.findall(r"(deploykit_\w+)\{", query)
    assert len(names) == 2
    for name in names:
        assert re.search(rf'^{name}\{{.*model="m"', text, re.M), name


def test_a_gpu_profile_asks_for_one_gpu(tmp_path: Path) -> None:
    found = written(tmp_path, profile="l4")
    assert container(found)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert found["ServingRuntime"]["spec"]["nodeSelector"] == {"kubernetes.io/arch": "amd64"}


def test_a_cpu_profile_asks_for_none(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert "nvidia.com/gpu" not in str(found)
    assert "nodeSelector" not in found["ServingRuntime"]["spec"]


def test_nothing_runs_as_root_or_writes_outside_its_volumes(tmp_path: Path) -> None:
    security = container(written(tmp_path))["securityContext"]
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_that_ends_serves_until_no_router_sends_it_requests(tmp_path: Path) -> None:
    found = written(tmp_path)
    pause_s = int(container(found)["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain_s = {each["name"]: each["value"] for each in container(found)["env"]}["DEPLOYKIT_DRAIN_S"]
    end_s = found["InferenceService"]["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert pause_s >= 5
    limits_s = server.MOST_LINGER_S + server.SOON_S + server.DRAIN_S + server.CLOSE_S
    assert end_s > pause_s + float(drain_s) + limits_s


def test_the_service_uses_the_runtime_next_to_it(tmp_path: Path) -> None:
    found = written(tmp_path, name="My.Model_2")
    model = found["InferenceService"]["spec"]["predictor"]["model"]
    runtime = found["ServingRuntime"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats


@pytest.mark.parametrize(
    "name", ["resnet18", "My.Model_2", "_x", "7b", "a" * 63, "a" * 50, "0", "-"]
)
def test_a_model_has_a_name_that_kubernetes_takes(name: str) -> None:
    label = kserve.dns_label(name)
    assert LABEL.fullmatch(label)
    assert len(f"deploykit-{label}") <= 63
    assert len(f"{label}-predictor") <= 63


def test_names_that_kubernetes_would_merge_stay_apart() -> None:
    names = ["a.b", "a_b", "a-b", "A-b", "a" * 62, "a" * 63]
    assert len({kserve.dns_label(name) for name in names}) == len(names)
