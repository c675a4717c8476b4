"""What a task adds to a model is compared with what the model's own library does."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch")
needs("onnxscript", "transformers", "tokenizers", "PIL")

from PIL import Image  # noqa: E402

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.evidence import SourceRecord  # noqa: E402
from deploykit.core.task import CLASSIFY, SEGMENT, TEXT_CLASSIFY  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.tasks.images import place  # noqa: E402
from deploykit.engines.torch.files import with_torchvision  # noqa: E402
from deploykit.engines.torch.folder import load_folder  # noqa: E402
from deploykit.engines.torch.loaded import load_live  # noqa: E402
from deploykit.exporting.heads.head import own_module  # noqa: E402
from deploykit.exporting.library import check_answers, check_pixels, preset_of_folder  # noqa: E402
from deploykit.exporting.load import ExportSource  # noqa: E402
from deploykit.exporting.task import read_options, with_task  # noqa: E402
from tests.support.bert import save_tiny_bert  # noqa: E402

pytestmark = pytest.mark.torch

SIDE = 32
BOTH, SHORTER = {"height": SIDE, "width": SIDE}, {"shortest_edge": SIDE}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "stretched": ("ViTImageProcessor", {"size": BOTH, "resample": 2}),
    "not square": ("ViTImageProcessor", {"size": {"height": 48, "width": SIDE}}),
    "nearest": ("ViTImageProcessor", {"size": BOTH, "resample": 0}),
    "cropped": ("CLIPImageProcessor", {"size": {"shortest_edge": 40}, "crop_size": BOTH}),
    "of a share": ("ConvNextImageProcessor", {"size": SHORTER, "crop_pct": 0.8}),
    "BGR": ("MobileViTImageProcessor", {"size": {"shortest_edge": 36}, "crop_size": BOTH}),
    "not normalised": ("ViTImageProcessor", {"size": BOTH, "do_normalize": False}),
    "bytes": ("ViTImageProcessor", {"size": BOTH, "do_normalize": False, "do_rescale": False}),
    "no crop": ("BeitImageProcessor", {"size": BOTH, "crop_size": {"height": 24, "width": 24}}),
}


def processor_in(folder: Path, name: str, **settings: Any) -> Any:
    import transformers

    kind = with_torchvision(lambda: getattr(transformers, name))
    made = kind(**settings)
    made.save_pretrained(folder)
    return made


def of_image() -> Any:
    spec = f"pixel_values:float32[N,3,{SIDE},{SIDE}]"
    return load_live(torch.nn.Flatten(), (parse_spec(spec),))


@pytest.mark.parametrize("case", PROCESSORS)
def test_an_image_is_prepared_as_the_folder_of_transformers_says(case: str, tmp_path: Path) -> None:
    name, settings = PROCESSORS[case]
    processor = processor_in(tmp_path, name, **settings)
    preset = preset_of_folder(tmp_path, of_image())
    assert preset is not None
    random = np.random.default_rng(1)
    small = Image.fromarray(random.integers(0, 256, (6, 9, 3)).astype(np.uint8))
    photo = small.resize((90, 60), Image.Resampling.BICUBIC)
    theirs = np.asarray(processor(images=photo, return_tensors="pt")["pixel_values"][0])
    rule = preset.preprocess
    placed = place(photo, preset.image, "").pixels
    ours = (placed * rule.scale - np.array(rule.mean)) / np.array(rule.std)
    spread = np.ptp(theirs)
    assert np.abs(ours.transpose(2, 0, 1) - theirs).mean() < spread / 255


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("YolosImageProcessor", {}),  # by the longer edge, and padded
        ("ViTImageProcessor", {"size": BOTH, "resample": 1}),  # Lanczos
        ("ViTImageProcessor", {"size": BOTH, "do_resize": False}),
    ],
)
def test_a_processor_that_does_something_else_is_refused_by_its_name(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    processor_in(tmp_path, name, **settings)
    with pytest.raises(BadInput, match=f"preprocessor_config.json: {name} prepares") as refused:
        preset_of_folder(tmp_path, of_image())
    assert "`preprocess`" in str(refused.value.hint)


def test_torchvisions_own_transform_prepares_the_same_pixels() -> None:
    needs("torchvision")
    from deploykit.engines.torch.presets import preset_of

    found = preset_of(torch.nn.Identity(), "squeezenet1_1")
    assert found is not None
    assert check_pixels(found) == ()
    other = replace(found, image=replace(found.image, resize_to=300))
    with pytest.raises(BadInput, match=r"SqueezeNet1_1_Weights.* prepares an image unlike"):
        check_pixels(other)


SMALL: dict[str, Any] = {
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 1, 1],
    "decoder_hidden_size": 8,
    "num_labels": 3,
}
WORDS = ["[PAD]", "[UNK]", "the", "dog", "quick"]


def saved(folder: Path, kind: str, **more: Any) -> Path:
    """Write a folder of transformers with all that its task needs."""
    import transformers

    torch.manual_seed(0)
    if kind == TEXT_CLASSIFY:
        import tokenizers

        save_tiny_bert(folder, **more)
        words = {word: number for number, word in enumerate(WORDS)}
        written = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        written.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=written, pad_token="[PAD]", model_max_length=32
        ).save_pretrained(folder)
        return folder
    name = "SemanticSegmentation" if kind == SEGMENT else "ImageClassification"
    model = with_torchvision(lambda: getattr(transformers, f"SegformerFor{name}"))
    model(transformers.SegformerConfig(**SMALL, **more)).save_pretrained(folder)
    processor_in(folder, "SegformerImageProcessor", size=BOTH)
    return folder


SEVERAL = {"problem_type": "multi_label_classification"}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (SEGMENT, {}),
        (CLASSIFY, {}),
        (CLASSIFY, SEVERAL),
        (TEXT_CLASSIFY, {}),
        (TEXT_CLASSIFY, SEVERAL),
    ],
)
def test_answers_are_those_of_transformers(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", kind, **more)
    loaded = load_folder(folder, None, ())
    source = ExportSource("model", loaded, (), SourceRecord("Hugging Face", "", False), folder)
    job = with_task(source, read_options(kind), None, {})
    assert not [note for note in job.notes if "not compared" in note]
    other = copy.deepcopy(own_module(loaded))
    for weight in other.parameters():
        torch.nn.init.normal_(weight)
    with pytest.raises(BadInput, match=f"`task` {kind}: its answers are not those of transformers"):
        check_answers(job.task, job.loaded, other, folder, pooled=False)
    (note,) = check_answers(job.task, job.loaded, other, None, pooled=False)
    assert "not compared with transformers' own answers: a live module has no folder" in note
