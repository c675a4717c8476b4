"""`export` with a task refuses a model whose outputs are not those of a head that it knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.engines.torch.files import with_torchvision  # noqa: E402

pytestmark = pytest.mark.torch

SIDE, QUERIES = 32, 20
SPEC = [f"image:float32[N,3,{SIDE},{SIDE}]"]
SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "image_size": [SIDE, SIDE],
    "patch_size": 8,
}


class Answers(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """Returns random numbers of the image in outputs of these names and shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] | list[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        named = shapes.items() if isinstance(shapes, dict) else enumerate(shapes)
        sizes = {str(name): int(np.prod(shape)) for name, shape in named}
        self.layers = torch.nn.ModuleDict(
            {name: torch.nn.Linear(3, size) for name, size in sizes.items()}
        )

    def forward(self, image: Any) -> Any:
        colour = image.mean(dim=(2, 3))
        found = {name: layer(colour) for name, layer in self.layers.items()}
        if isinstance(self.shapes, dict):
            return {name: found[name].reshape(-1, *shape) for name, shape in self.shapes.items()}
        return tuple(found[str(at)].reshape(-1, *shape) for at, shape in enumerate(self.shapes))


def of_transformers(name: str, **settings: Any) -> Any:
    needs("transformers")
    import transformers

    kind = with_torchvision(lambda: getattr(transformers, name))
    return kind(kind.config_class(**{**SMALL, **settings})).eval()


def yolos(labels: int) -> Any:
    return of_transformers(
        "YolosForObjectDetection", num_detection_tokens=QUERIES, num_labels=labels
    )


def pose() -> Any:
    needs("transformers")
    import transformers

    body = transformers.VitPoseBackboneConfig(**{**SMALL, "patch_size": [8, 8]}, out_indices=[1])
    kind = with_torchvision(lambda: transformers.VitPoseForPoseEstimation)
    return kind(transformers.VitPoseConfig(backbone_config=body)).eval()


DETR = {"logits": (QUERIES, 92), "pred_boxes": (QUERIES, 4)}
MASKS = {"class_queries_logits": (QUERIES, 5), "masks_queries_logits": (QUERIES, 8, 8)}
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "detr": ("detect", lambda: Answers(DETR), r"logits:float32\[N,20,92\], pred_boxes:float32"),
    "detr of 2 classes": ("detect", lambda: Answers({**DETR, "logits": (QUERIES, 6)}), "pred_box"),
    "detr as a tuple": ("detect", lambda: Answers([(QUERIES, 92), (QUERIES, 4)]), "output_1"),
    "boxes of another model": (
        "detect",
        lambda: Answers({"boxes": (QUERIES, 4), "scores": (QUERIES, 5), "masks": (QUERIES, 9)}),
        "masks:float32",
    ),
    "yolos": ("detect", lambda: yolos(91), r"transformers' YolosForObjectDetection: .*pred_boxes"),
    "yolos of 5 classes": ("detect", lambda: yolos(5), r"logits:float32\[N,20,6\], pred_boxes"),
    "tokens": (
        "detect",
        lambda: of_transformers("ViTModel").eval(),
        r"transformers' ViTModel: .*last_hidden_state",
    ),
    "one output of transformers": (
        "detect",
        lambda: of_transformers("ViTForMaskedImageModeling", encoder_stride=8).vit,
        "transformers' ViTModel: its outputs are last_hidden_state",
    ),
    "masks of queries": ("segment", lambda: Answers(MASKS), "masks_queries_logits:float32"),
    "masks of a detr": (
        "segment",
        lambda: Answers({**DETR, "pred_masks": (QUERIES, 8, 8)}),
        "pred_masks:float32",
    ),
    "pose": ("segment", pose, "transformers' VitPoseForPoseEstimation: its outputs are heatmaps"),
    "detr as a classifier": (
        "classify",
        lambda: Answers({**DETR, "pooled_boxes": (4,)}),
        "pooled_boxes:float32",
    ),
    "features as scores": ("classify", lambda: of_transformers("ViTModel"), "pooler_output"),
    "age and sex": ("classify", lambda: Answers({"age": (9,), "sex": (2,)}), "age:float32.*sex"),
    "which vector": ("embed", lambda: Answers({"features": (9,), "logits": (2,)}), "features:"),
    "boxes as a vector": ("embed", lambda: Answers({"boxes": (4,), "pose": (9,)}), "pose:float"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_outputs_that_are_no_known_head_are_refused_by_name(case: str, tmp_path: Path) -> None:
    task, build, reason = REFUSED[case]
    with pytest.raises(dk.BadInput, match=f"`task` {task} does not fit .*{reason}") as caught:
        dk.export(
            build().eval(),
            out=tmp_path / "m.onnx",
            inputs=SPEC,
            preprocess="imagenet",
            task=task,
        )
    assert f"{task} " in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_names_six_outputs_and_counts_the_others(tmp_path: Path) -> None:
    model = Answers({f"map_{number}": (QUERIES, 92) for number in range(9)}).eval()
    given: dict[str, Any] = {"inputs": SPEC, "preprocess": "imagenet", "task": "detect"}
    with pytest.raises(dk.BadInput, match=r"map_5:float32\[N,20,92\] and 3 more") as caught:
        dk.export(model, out=tmp_path / "m.onnx", **given)
    assert "wrap the model in a module that returns this alone" in str(caught.value.hint)


KNOWN: dict[str, tuple[str, Callable[[], Any], str, str]] = {
    "pooled vector": ("embed", lambda: of_transformers("ViTModel"), "last_hidden_state", "pooler_"),
    "distilled classifier": (
        "classify",
        lambda: of_transformers("DeiTForImageClassificationWithTeacher", num_labels=5),
        "cls_logits, distillation_logits",
        "logits",
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_a_head_of_several_outputs_that_is_known_is_read_by_name(case: str, tmp_path: Path) -> None:
    task, build, others, answer = KNOWN[case]
    torch.manual_seed(0)
    model = build()
    (tmp_path / "p.toml").write_text("mean = [0, 0, 0]\nstd = [1, 1, 1]\n")
    given: dict[str, Any] = {"inputs": SPEC, "preprocess": str(tmp_path / "p.toml"), "task": task}
    made = dk.export(model, out=tmp_path / "m.onnx", **given)
    assert f"left out: the outputs {others}" in made.notes
    image = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8)
    with torch.inference_mode():
        found = model(torch.from_numpy(image).permute(0, 3, 1, 2) / 255)
    vector = next(value for name, value in found.items() if name.startswith(answer))
    norm = torch.nn.functional.normalize
    expected = norm(vector, dim=1) if task == "embed" else vector.softmax(1)
    with dk.load(made.path, "cpu") as engine:
        (answered,) = engine({"image": image}).values()
    np.testing.assert_allclose(answered, expected, atol=2e-6)
