"""Bundles for Triton, KServe and Ray: their own schemas and messages read them, and our server.

`kubernetes.json` holds the schemas: scripts/kubernetes_schemas.py says where they come from.
"""

from __future__ import annotations

import ast
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper

from deploykit.core.artefact import Artefact, Manifest, write_manifest
from deploykit.core.errors import Unsupported
from deploykit.core.evidence import Evidence, GoldenSamples, RowIndependence
from deploykit.core.files import sha256
from deploykit.core.profile import load_profile
from deploykit.core.tensors import DTYPE_BYTES, TensorSpec, carrier, concrete
from deploykit.deploying import clusters
from deploykit.deploying.folder import Contents
from deploykit.engines.data.samples import write_npz
from deploykit.serving import server
from deploykit.serving.http.routes import Routes
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine
from tests.support.serving.scrapes import exposition

pytest.importorskip("tritonclient", reason="needs Triton's protobuf messages")
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

SCHEMAS = json.loads(
    (Path(__file__).parents[1] / "support/bundling/kubernetes.json").read_text("utf-8")
)
IMAGE = TensorSpec("image", "float32", ("N", 3, 8, 8))
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
INDEPENDENT = RowIndependence(True, "the same alone and joined", (1, 2))


def contents_of(
    folder: Path,
    specs: Sequence[TensorSpec],
    *,
    profile: str = "cpu",
    name: str = "m",
    proof: RowIndependence | None = INDEPENDENT,
    precision: dict[str, int] | None = None,
) -> Contents:
    """A model with the inputs `specs`, each also an output: `NAME out`."""
    path = folder / "model.onnx"
    path.write_bytes(echo(specs).SerializeToString())
    feeds = {spec.name: sample(spec) for spec in specs}
    golden = path.with_name(f"{path.name}.golden.npz")
    outputs = {f"{spec.name} out": feeds[spec.name] for spec in specs}
    arrays = {f"inputs/{n}": a for n, a in feeds.items()} | {
        f"outputs/{n}": a for n, a in outputs.items()
    }
    write_npz(golden, arrays)
    manifest = Manifest(
        format="onnx",
        inputs=tuple(specs),
        outputs=tuple(TensorSpec(f"{s.name} out", s.dtype, s.shape) for s in specs),
        precision=precision or {"float32": 1},
        sha256=sha256(path),
        evidence=Evidence(
            batching=proof,
            golden=GoldenSamples(golden.name, sha256(golden), "onnxruntime", 1e-3),
        ),
    )
    write_manifest(path, manifest)
    return Contents(Artefact.open(path), load_profile(profile), name, (1, 8, 32))


def echo(specs: Sequence[TensorSpec]) -> onnx.ModelProto:
    def info(spec: TensorSpec, name: str) -> onnx.ValueInfoProto:
        kinds = {"float32": "FLOAT", "float64": "DOUBLE"}
        kind = getattr(TensorProto, kinds.get(spec.dtype, spec.dtype.upper()))
        return helper.make_tensor_value_info(name, kind, spec.shape)

    nodes = [helper.make_node("Identity", [s.name], [f"{s.name} out"]) for s in specs]
    graph = helper.make_graph(
        nodes,
        "echo",
        [info(spec, spec.name) for spec in specs],
        [info(spec, f"{spec.name} out") for spec in specs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def sample(spec: TensorSpec) -> np.ndarray:
    shape = concrete(spec, {str(axis): 4 if axis == "N" else 3 for axis in spec.shape})
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if spec.dtype == "string":
        return np.array([f"ü{value}" for value in values.reshape(-1)]).reshape(shape)
    return np.asarray(values % 2 if spec.dtype == "bool" else values, carrier(spec.dtype))


# -- Triton


def triton_config(folder: Path, specs: Sequence[TensorSpec] = (IMAGE,), **given: Any) -> Any:
    """Triton's ModelConfig of a bundle that was written to `folder`/out."""
    (folder / "out").mkdir()
    contents = contents_of(folder, specs, **given)
    clusters.write_triton(folder / "out", contents)
    text = (folder / "out" / contents.name / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_a_proven_model_is_joined_up_to_the_largest_batch_and_warmed_up(tmp_path: Path) -> None:
    config = triton_config(tmp_path, [IMAGE, TensorSpec("ids", "int64", ("N", "T"))])
    out = tmp_path / "out"
    found = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    assert {"m/config.pbtxt", "m/1/model.onnx", "m/warmup/input-0", "README.md"} <= found
    assert config.max_batch_size == 32
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 32]
    assert list(config.input[0].dims) == [3, 8, 8]
    assert [entry.batch_size for entry in config.model_warmup] == [1, 8, 32]
    entry = config.model_warmup[1].inputs["ids"]
    assert list(entry.dims) == [3]
    assert len((out / "m/warmup" / entry.input_data_file).read_bytes()) == 3 * 8
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert accelerators(config) == {}


@pytest.mark.parametrize(
    ("proof", "spec", "dims", "why"),
    [
        (None, IMAGE, [-1, 3, 8, 8], ""),
        (
            RowIndependence(False, "row 1 changed row 0"),
            IMAGE,
            [-1, 3, 8, 8],
            "off, as row 1 changed row 0.",
        ),
        (INDEPENDENT, TensorSpec("x", "float32", (4, "T")), [4, -1], ""),  # it has no batch axis
    ],
    ids=["none", "failed", "no batch"],
)
def test_rows_without_a_proof_are_not_joined(
    tmp_path: Path, proof: RowIndependence | None, spec: TensorSpec, dims: list[int], why: str
) -> None:
    config = triton_config(tmp_path, [spec], proof=proof)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == dims
    assert why in (tmp_path / "out/README.md").read_text("utf-8")


@pytest.mark.parametrize(("shape", "reshaped"), [((), False), (("N",), True)], ids=str)
def test_scalars_have_one_element(tmp_path: Path, shape: tuple[str, ...], reshaped: bool) -> None:
    config = triton_config(tmp_path, [TensorSpec("x", "int64", shape)])
    for tensor in config.input[0], config.output[0]:
        assert list(tensor.dims) == [1]
        assert tensor.HasField("reshape") is reshaped  # Triton refuses it without a batch
        assert list(tensor.reshape.shape) == []
    assert (tmp_path / "out/m/warmup/input-0").read_bytes() == bytes(8)


@pytest.mark.parametrize("dtype", [*sorted({*DTYPE_BYTES} - {"bfloat16"}), "string"])
def test_every_dtype_has_its_type_and_warm_up_bytes(tmp_path: Path, dtype: str) -> None:
    config = triton_config(tmp_path, [TensorSpec("x", dtype, ("N", 2))])
    names = {"float16": "FP16", "float32": "FP32", "float64": "FP64"}
    found = model_config_pb2.DataType.Name(config.input[0].data_type)
    assert found == f"TYPE_{names.get(dtype, dtype.upper())}"
    warm = (tmp_path / "out/m/warmup/input-0").read_bytes()
    if dtype == "string":
        assert warm == b"".join(struct.pack("<I", 3) + f"ü{n}".encode() for n in range(2))
    else:
        assert np.frombuffer(warm, dtype).tolist() == [0, 1]


TENSOR_NAMES = ['a "quoted" one', "two\nlines", "back\\slash", "tab\t", "größe ✓", "\x7f", "x:0"]


def test_any_tensor_name_survives(tmp_path: Path) -> None:
    config = triton_config(
        tmp_path, [TensorSpec(name, "float32", ("N", 2)) for name in TENSOR_NAMES]
    )
    assert [each.name for each in config.input] == TENSOR_NAMES
    assert set(config.model_warmup[0].inputs) == set(TENSOR_NAMES)


def accelerators(config: Any) -> dict[str, dict[str, str]]:
    found = config.optimization.execution_accelerators.gpu_execution_accelerator
    return {each.name: dict(each.parameters) for each in found}


IDS = TensorSpec("ids", "int64", ("N", "T"))  # more than the batch varies


@pytest.mark.parametrize(
    ("spec", "precision", "mode", "shapes"),
    [
        (IMAGE, {"float32": 2}, "FP32", "image:8x3x8x8"),
        (IMAGE, {"float32": 2, "float16": 1}, "FP16", "image:8x3x8x8"),
        (IMAGE, {"float16": 2, "int8": 1}, "INT8", "image:8x3x8x8"),
        (IDS, {"float32": 2}, "FP32", None),
        (IMAGE, {"bfloat16": 3}, None, None),  # the option lacks it
    ],
)
def test_a_gpu_profile_gets_tensorrt_with_the_precision_of_the_graph(
    tmp_path: Path, spec: TensorSpec, precision: dict[str, int], mode: str | None, shapes: str
) -> None:
    config = triton_config(tmp_path, [spec], profile="l4", precision=precision)
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    options = accelerators(config).get("tensorrt", {})
    assert options.get("precision_mode") == mode
    assert options.get("trt_profile_opt_shapes") == shapes


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (TensorSpec("x", "float32", (0, 3)), "'x' is empty"),
        (TensorSpec("x", "bfloat16", ("N", 3)), "'x' is bfloat16"),
    ],
)
def test_what_the_backend_does_not_take_is_refused(
    tmp_path: Path, spec: TensorSpec, why: str
) -> None:
    with pytest.raises(Unsupported, match=why):
        triton_config(tmp_path, [spec])


# -- KServe


def written(folder: Path, **given: Any) -> dict[str, Any]:
    """The manifests by kind, and the container."""
    (folder / "out").mkdir()
    clusters.write_kserve(folder / "out", contents_of(folder, [IMAGE], **given))
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
    routes = Routes(repository, lambda work, then: then(work))
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
    labels = [clusters.dns_label(name) for name in NAMES]
    assert len(set(labels)) == len(NAMES)
    for label in labels:
        assert LABEL.fullmatch(label)
        assert len(f"deploykit-{label}") <= 63
        assert len(f"{label}-predictor") <= 63


# -- Ray: test_ray_cluster.py runs one, where Ray is installed


def written_for_ray(folder: Path, **given: Any) -> Path:
    (folder / "out").mkdir()
    clusters.write_ray(folder / "out", contents_of(folder, [IMAGE], **given))
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
    assert '"front", "model"' in Path(clusters.__file__).with_name("ray_app.py").read_text("utf-8")
    assert found["model"]["ray_actor_options"] == options
    assert found["model"]["autoscaling_config"]["target_ongoing_requests"] == 8
    assert found["model"]["max_ongoing_requests"] == 64
