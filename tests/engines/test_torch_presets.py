"""What the libraries say of their own models: read from their metadata, nothing downloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import deploykit as dk  # noqa: E402
from deploykit.core.errors import BadInput, NotFound  # noqa: E402
from deploykit.core.task import CLASSIFY, EMBED, ImageInput  # noqa: E402
from deploykit.engines.torch import presets  # noqa: E402
from deploykit.engines.torch.open import load_module  # noqa: E402
from tests.support.installed import needs  # noqa: E402

pytestmark = pytest.mark.torch
preset_of: Any = presets.preset_of


@pytest.fixture(scope="module")
def models() -> Any:
    needs("torchvision")
    return presets._torchvision()


@pytest.mark.parametrize("arch", ["shufflenet_v2_x0_5", "torchvision.models:shufflenet_v2_x0_5"])
def test_a_name_of_torchvisions_is_enough(models: Any, arch: str, tmp_path: Path) -> None:
    weights = models.shufflenet_v2_x0_5(weights=None, num_classes=7).state_dict()
    for front in ("", "_orig_mod.module."):
        torch.save({front + key: value for key, value in weights.items()}, tmp_path / "w.pth")
        loaded = load_module(tmp_path / "w.pth", arch=arch)
        assert [str(spec) for spec in loaded.inputs] == ["image:float32[N,3,224,224]"]
        assert [spec.shape for spec in loaded.outputs] == [("N", 7)]
    torch.save(models.shufflenet_v2_x0_5(weights=None).state_dict(), tmp_path / "w.pth")
    found: Any = load_module(tmp_path / "w.pth", arch=arch).preset
    assert found.image == ImageInput("image", 224, 224, "shortest-edge", 256)
    assert found.preprocess.mean == (0.485, 0.456, 0.406)
    assert found.labels[:2] == ("tench", "goldfish")
    assert len(found.labels) == 1000


def test_weights_that_torchvision_published_are_known_by_their_hash(
    models: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """resnet50-0676ba61.pth is IMAGENET1K_V1, whose images are resized to 256, not 232."""
    path, module = tmp_path / "w.pth", torch.nn.Identity()
    path.write_bytes(b"weights")

    def preset(arch: str, sha256: str) -> Any:
        monkeypatch.setattr(presets, "sha256", lambda _path: sha256 + 56 * "0")
        return preset_of(module, arch, path)

    newest, first = preset("resnet50", "00000000"), preset("resnet50", "0676ba61")
    assert (newest.image.resize_to, first.image.resize_to) == (232, 256)
    assert first.source == "torchvision's weights ResNet50_Weights.IMAGENET1K_V1"
    assert newest.source.startswith("the assumption that all is as for ResNet50_Weights.IMAGENET")
    found = preset("vgg16", "amdegroot"[:8])  # for detectors: None for the labels
    assert (found.labels, found.source[-8:]) == ((), "FEATURES")


def test_the_auxiliary_outputs_of_wrapped_weights_are_built_too(models: Any) -> None:
    assert presets.build_named("fcn_resnet50", {}).aux_classifier is None
    weights = {"module.aux_classifier.4.bias": torch.zeros(21)}
    assert presets.build_named("fcn_resnet50", weights).aux_classifier is not None


def test_an_image_that_was_placed_for_a_detector_is_not_resized_again(models: Any) -> None:
    module = models.get_model(
        "fasterrcnn_mobilenet_v3_large_320_fpn", weights=None, weights_backbone=None
    ).eval()
    preset = preset_of(module, "fasterrcnn_mobilenet_v3_large_320_fpn")
    height, width = preset.image.height, preset.image.width - 64  # as with `inputs` of another size
    image = torch.zeros(3, height, width)
    assert module.transform([image])[0].tensors.shape[2:] != (height, width)
    assert presets.switch_resizing_off(module, height, width)
    assert module.transform([image])[0].tensors.shape[2:] == (height, width)
    assert not presets.switch_resizing_off(torch.nn.Identity(), height, width)


def test_a_segmentation_of_the_photos_ratio_sees_what_torchvision_shows_it(models: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    from deploykit.engines.data.images import place

    name = "lraspp_mobilenet_v3_large"
    preset = preset_of(torch.nn.Identity(), name)
    photo = image.effect_noise((640, 427), 80).convert("RGB")
    theirs = models.get_model_weights(name).DEFAULT.transforms()(photo)
    fixed = replace(preset.image, height=520, width=779)
    free = ImageInput("image", 0, 0, "shortest-edge", 520)
    placed, other = (place(photo, rule, "photo") for rule in (fixed, free))
    np.testing.assert_array_equal(placed.pixels, other.pixels)
    ours = torch.tensor(placed.pixels).permute(2, 0, 1) / 255
    mean, std = (
        torch.tensor(each)[:, None, None]
        for each in (preset.preprocess.mean, preset.preprocess.std)
    )
    torch.testing.assert_close((ours - mean) / std, theirs, atol=1e-6, rtol=0)


def test_timms_configuration_of_a_model_is_its_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """As timm's own transforms do it: resized to 224 / 0.9, then the middle is cut out."""
    needs("onnxscript")
    monkeypatch.setattr(presets, "_timm_labels", lambda _module: ("a", "b"))
    module = torch.nn.Linear(2, 2)
    module.pretrained_cfg = {
        "architecture": "net",
        "tag": "in1k",
        "input_size": (3, 224, 224),
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.25, 0.25, 0.25),
    }
    found = preset_of(module)
    assert found.image == ImageInput("image", 224, 224, "shortest-edge", 248, "bicubic")
    assert (found.preprocess.std, found.labels) == ((0.25, 0.25, 0.25), ("a", "b"))
    assert found.source == "timm's configuration of net.in1k"
    module.pretrained_cfg["crop_mode"] = "squash"
    squashed = preset_of(module)
    assert (squashed.image.resize, squashed.image.resize_to) == ("stretch", 248)
    module.num_classes = 0  # timm's for a model without its classifier
    assert [each.task for each in (found, preset_of(module)) if each] == [CLASSIFY, EMBED]
    module.num_classes = module.pretrained_cfg["num_classes"] = 512  # CLIP's size, no classes
    monkeypatch.setattr(presets, "_timm_labels", lambda _module: ())
    with pytest.raises(BadInput, match=r"timm's configuration of net\.in1k the outputs are feat"):
        dk.export(module, inputs=["x:float32[N,3,2,2]"], out="x.onnx", task="classify")


def test_a_name_that_nobody_knows_is_refused_with_the_nearest(models: Any) -> None:
    with pytest.raises(NotFound, match="`arch` resnet81: torchvision has no model") as caught:
        presets.build_named("resnet81", {})
    assert "resnet18" in str(caught.value.hint) or "resnet101" in str(caught.value.hint)
