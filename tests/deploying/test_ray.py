"""A Ray bundle: what its files say. tests/cluster runs one, where Ray is installed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploykit.core.tensors import TensorSpec
from deploykit.deploying import ray
from tests.support.bundling.contents import contents_of

IMAGE = TensorSpec("image", "float32", ("N", 3, 8, 8))


def written(folder: Path, **given: Any) -> Path:
    (folder / "out").mkdir()
    ray.write(folder / "out", contents_of(folder, [IMAGE], **given))
    return folder / "out"


def deployments(out: Path) -> dict[str, dict[str, Any]]:
    config = yaml.safe_load((out / "serve.yaml").read_text("utf-8"))
    return {each["name"]: each for each in config["applications"][0]["deployments"]}


def test_the_application_names_the_model_that_is_in_the_folder(tmp_path: Path) -> None:
    out = written(tmp_path, name="a.b_c-1")
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
    found = deployments(written(tmp_path, profile=profile))
    assert set(found) == {"front", "model"}
    assert '"front", "model"' in Path(ray.__file__).with_name("ray_app.py").read_text("utf-8")
    assert found["model"]["ray_actor_options"] == options
    assert found["model"]["autoscaling_config"]["target_ongoing_requests"] == 8
    assert found["model"]["max_ongoing_requests"] == 64
