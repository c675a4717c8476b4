"""Bundles for KServe and Ray: they fit KServe's and Kubernetes' schemas, and our own server.

`kubernetes.json` holds the schemas: scripts/kubernetes_schemas.py says where they come from.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploykit.core.tensors import TensorSpec
from deploykit.deploying import kserve, ray
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
    """The manifests by kind, and the container."""
    (folder / "out").mkdir()
    kserve.write(folder / "out", contents_of(folder, [IMAGE], **given))
    texts = [path.read_text("utf-8") for path in (folder / "out").glob("*.yaml")]
    found = {each.get("kind", "Kustomization"): each for each in map(yaml.safe_load, texts)}
    return {**found, "container": found["ServingRuntime"]["spec"]["containers"][0]}


def check(kind: str, document: dict[str, Any]) -> None:
    schema = {"$ref": f"#/definitions/{kind}", "definitions": SCHEMAS["definitions"]}
    import jsonschema  # takes a second

    jsonschema.Draft7Validator(schema).validate(document)


@pytest.mark.parametrize(
    ("profile", "gpu", "architecture"),
    [("cpu", None, None), ("l4", "1", "amd64"), ("jetson-orin-nano-8gb", "1", "arm64")],
)
def test_the_manifests_fit_the_schemas_and_ask_for_the_profiles_gpu(
    tmp_path: Path, profile: str, gpu: str | None, architecture: str | None
) -> None:
    found = written(tmp_path, profile=profile)
    check("V1alpha1ServingRuntime", found["ServingRuntime"])
    check("V1beta1InferenceService", found["InferenceService"])
    assert found["container"].get("resources", {}).get("limits", {}).get("nvidia.com/gpu") == gpu
    selector = found["ServingRuntime"]["spec"].get("nodeSelector", {})
    assert selector.get("kubernetes.io/arch") == architecture
    security = found["container"]["securityContext"]
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_probes_and_autoscaling_ask_for_what_the_server_has(tmp_path: Path) -> None:
    found = written(tmp_path)
    repository = ModelRepository({"m": FakeEngine()}, ServeOptions())
    routes = Routes(repository)
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found["container"][kind]["httpGet"]["path"] in routes._table
    predictor = found["InferenceService"]["spec"]["predictor"]
    query = predictor["autoScaling"]["metrics"][0]["external"]["metric"]["query"]
    text = exposition(repository.samples())[0].decode()
    names = re.findall(r"(deploykit_\w+)\{", query)
    assert len(names) == 2
    for name in names:
        assert re.search(rf'^{name}\{{.*model="m"', text, re.M), name


def test_the_container_starts_as_the_command_line_takes_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from deploykit.cli.main import app

    given = written(tmp_path)["container"]
    assert given["command"] == ["deploykit"]
    folders = {"/mnt/models": str(tmp_path / "out"), "/engines": str(tmp_path / "engines")}
    result = CliRunner().invoke(app, [folders.get(each, each) for each in given["args"]])
    assert "bundle.json" in result.output + str(result.exception)  # `seal` has not written it


def test_a_pod_that_ends_serves_until_no_router_sends_it_requests(tmp_path: Path) -> None:
    found = written(tmp_path)
    pause_s = int(found["container"]["lifecycle"]["preStop"]["exec"]["command"][-1])
    environment = {each["name"]: each["value"] for each in found["container"]["env"]}
    end_s = found["InferenceService"]["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert pause_s >= 5
    limits_s = server.MOST_LINGER_S + server.SOON_S + server.DRAIN_S + server.CLOSE_S
    assert end_s > pause_s + float(environment["DEPLOYKIT_DRAIN_S"]) + limits_s


def test_the_service_uses_the_runtime_next_to_it(tmp_path: Path) -> None:
    found = written(tmp_path, name="My.Model_2")
    model = found["InferenceService"]["spec"]["predictor"]["model"]
    runtime = found["ServingRuntime"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats


NAMES = [
    *("resnet18", "My.Model_2", "_x", "7b", "a" * 50, "0", "-"),
    *("a.b", "a_b", "a-b", "A-b", "a" * 62, "a" * 63),  # which Kubernetes would merge
]


def test_each_model_has_a_name_of_its_own_that_kubernetes_takes() -> None:
    labels = [kserve.dns_label(name) for name in NAMES]
    assert len(set(labels)) == len(NAMES)
    for label in labels:
        assert LABEL.fullmatch(label)
        assert len(f"deploykit-{label}") <= 63
        assert len(f"{label}-predictor") <= 63


# -- Ray: test_ray_cluster.py runs one, where Ray is installed


def written_for_ray(folder: Path, **given: Any) -> Path:
    (folder / "out").mkdir()
    ray.write(folder / "out", contents_of(folder, [IMAGE], **given))
    return folder / "out"


def deployments(out: Path) -> dict[str, dict[str, Any]]:
    config = yaml.safe_load((out / "serve.yaml").read_text("utf-8"))
    return {each["name"]: each for each in config["applications"][0]["deployments"]}


def test_the_application_names_the_model_that_is_in_the_folder(tmp_path: Path) -> None:
    out = written_for_ray(tmp_path, name="a.b_c-1")
    tree = ast.parse((out / "app.py").read_text("utf-8"))
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert {"a.b_c-1.onnx", "a.b_c-1", "cpu", 32} <= set(constants)
    assert (out / "model" / "a.b_c-1.onnx").is_file()


@pytest.mark.parametrize(
    ("profile", "options"), [("cpu", {"num_cpus": 2.0}), ("l4", {"num_gpus": 1})]
)
def test_a_replica_gets_what_the_profile_runs_on_and_scales_with_the_usual_batch(
    tmp_path: Path, profile: str, options: dict[str, float]
) -> None:
    found = deployments(written_for_ray(tmp_path, profile=profile))
    assert set(found) == {"front", "model"}
    assert '"front", "model"' in Path(ray.__file__).with_name("ray_app.py").read_text("utf-8")
    assert found["model"]["ray_actor_options"] == options
    assert found["model"]["autoscaling_config"]["target_ongoing_requests"] == 8
    assert found["model"]["max_ongoing_requests"] == 64
