"""`dk.export` of Hugging Face folders, compared with their own library, and of Lightning files."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript", "onnxruntime", "transformers", "tokenizers", "PIL")

from PIL import Image  # noqa: E402

import deploykit as dk  # noqa: E402
from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.extras import installed  # noqa: E402
from deploykit.core.files import sha256  # noqa: E402
from deploykit.core.task import CLASSIFY, SEGMENT, TEXT_CLASSIFY, TaskOutputs, TextInput  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.data.images import place  # noqa: E402
from deploykit.engines.torch.loaded import load_live  # noqa: E402
from deploykit.engines.torch.open import load_folder  # noqa: E402
from deploykit.exporting.heads.head import own_module  # noqa: E402
from deploykit.exporting.library import check_answers, check_pixels, preset_of_folder  # noqa: E402
from deploykit.exporting.task import read_options, with_task  # noqa: E402
from tests.support.bert import save_tiny_bert  # noqa: E402
from tests.support.runtimes.tokenizer import write_tokenizer  # noqa: E402

pytestmark = pytest.mark.torch

LABELS = ("negative", "neutral", "positive")


def of_transformers(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = save_tiny_bert(
        tmp_path_factory.mktemp("text") / "bert",
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
    )
    write_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 20}')
    return folder


@pytest.fixture(scope="module")
def made(bert: Path) -> Any:
    return dk.export(bert, task="text-classify")


def changed(bert: Path, folder: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A copy of the model with other files, None for none, and other keys in its config.json."""
    shutil.copytree(bert, folder)
    if config is not None:
        files["config"] = json.dumps(json.loads((bert / "config.json").read_text()) | config)
    for name, text in files.items():
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
    return folder


def bert_of(kind: str, folder: Path, bert: Path) -> Path:
    save_tiny_bert(folder, kind)
    shutil.copy(bert / "tokenizer.json", folder)
    return folder


def test_a_folders_own_labels_tokenizer_and_length_are_taken(made: Any, bert: Path) -> None:
    assert made.path == bert.parent / "bert.onnx"
    specs = ["input_ids:int64[N,T]", "attention_mask:int64[N,T]"]
    assert [str(spec) for spec in made.manifest.inputs] == specs
    source, task = made.manifest.evidence.source, made.manifest.task
    named = "transformers.BertForSequenceClassification"
    assert (source.kind, source.model_class) == ("Hugging Face", named)
    copied = made.path.with_name("bert.onnx.tokenizer.json")
    assert (task.labels, task.outputs) == (LABELS, TaskOutputs(scores="scores"))
    assert task.text == TextInput(
        ids="input_ids",
        tokenizer=copied.name,
        sha256=sha256(bert / "tokenizer.json"),
        max_length=20,
        mask="attention_mask",
    )
    assert copied.read_bytes() == (bert / "tokenizer.json").read_bytes()


def test_the_tokenizer_goes_along_with_what_is_made_of_the_model(made: Any, tmp_path: Path) -> None:
    kept = made.manifest.task
    for result in (
        dk.quantize(made.path, "fp16", out=tmp_path / "h.onnx"),
        dk.build(made.path, "cpu", out=tmp_path / "b.onnx"),
    ):
        found = dk.inspect(result.path).manifest.task
        assert found == kept.named_after(result.path.name)
        assert sha256(result.path.with_name(found.text.tokenizer)) == kept.text.sha256
    for file in made.path.parent.glob("bert.onnx*"):
        shutil.copyfile(file, tmp_path / file.name)
    other = tmp_path / "bert.onnx.tokenizer.json"
    other.write_text(other.read_text() + " ")
    with pytest.raises(dk.BadInput, match=r"bert\.onnx\.tokenizer\.json: is not the file that"):
        dk.quantize(tmp_path / "bert.onnx", "fp16", out=tmp_path / "n.onnx")
    assert not (tmp_path / "n.onnx").exists()


def test_transformers_shows_no_progress_of_its_own(
    bert: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import transformers

    load_folder(bert, None, ())
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled()  # the caller's own loads show one


VOCABULARY = {"type": "WordLevel", "vocab": {"new": 32, "[UNK]": 1}, "unk_token": "[UNK]"}
MORE_TOKENS = json.dumps({"version": "1.0", "model": VOCABULARY})
WHAT_IT_IS = "what the model is or what its inputs are"
NO_CLASS: dict[str, Any] = {"architectures": None}
OWN_CODE = {
    "architectures": ["Mine"],
    "auto_map": {"AutoModel": "modeling_mine.Mine", "AutoConfig": "modeling_mine.Config"},
}
TEXT, EMBED = {"task": "text-classify"}, {"task": "embed"}
NO_FIT = "does not fit transformers' "
PLACES = ["input_ids:int64[N,T]", "position_ids:int64[N,T]"]
FILES: dict[str, tuple[dict[str, Any], str]] = {  # what is changed in the folder
    "no tokenizer": ({"tokenizer": None}, "needs the model's tokenizer; .*json: no such file"),
    "no tokens": ({"tokenizer": "{}"}, "tokenizer.json: is not a tokenizer.json"),
    "no JSON": ({"tokenizer": "{"}, "tokenizer.json: is not valid JSON"),
    "more tokens": ({"tokenizer": MORE_TOKENS}, "has token 32, the model's tokens are 0 to 31"),
    "a regression": (
        {"config": {"problem_type": "regression"}},
        "the outputs are numbers, not cla",
    ),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "what it names itself": ({"arch": "a:b"}, "so `arch` a:b has nothing to build"),
    "too long": (TEXT | {"max_length": 65}, "`max_length` 65: the model has 64 positions"),
    "labels": (TEXT | {"labels": ["a"]}, "holds 1 labels, the model has 3 classes"),
    "an image": ({"task": "classify"}, "is for one image; .*for a text: `task` embed or text-clas"),
    "a second input": (TEXT | {"inputs": PLACES}, "nothing fills position_ids"),
    "pooled scores": (TEXT | {"pooling": "mean"}, "`pooling` does not go with `task` text"),
    "scores as a vector": (EMBED, f"{NO_FIT}BertForSequenceClassification: its outputs are logits"),
}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {  # a class, or what is changed
    "no architecture": ({"config": NO_CLASS}, {}, f"{WHAT_IT_IS}.*`arch`.*`inputs`"),
    "an unknown one": ({"config": OWN_CODE}, {}, "has no model 'Mine'"),
    "unknown pooling": ("BertModel", EMBED | {"pooling": "max"}, "`pooling` max: unknown"),
    **{
        f"two heads, {given}": (
            "BertForPreTraining",
            given,
            f"{NO_FIT}BertForPreTraining: .*seq_relationship_logits",
        )
        for given in (TEXT, EMBED, EMBED | {"pooling": "mean"})
    },
    **{case: (files, TEXT, reason) for case, (files, reason) in FILES.items()},
    **{case: ({}, *row) for case, row in OPTIONS.items()},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_folder_lacks_or_does_not_fit_is_refused_by_name(
    bert: Path, tmp_path: Path, case: str
) -> None:
    other, given, reason = REFUSED[case]
    if isinstance(other, str):
        folder = bert_of(other, tmp_path / "m", bert)
    else:
        folder = changed(bert, tmp_path / "m", **other)
    (folder / "modeling_mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(dk.BadInput) as caught:
        dk.export(folder, out=tmp_path / "x.onnx", **given)
    assert re.search(reason, f"{caught.value.message} {caught.value.hint}")
    assert not (tmp_path / "x.onnx").exists()


def test_missing_weights_are_not_replaced_by_random_ones(bert: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed(bert, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["classifier.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(dk.BadInput, match=r"missing classifier\.bias"):
        dk.export(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(dk.BadInput, match=r"no model\.safetensors"):
        dk.export(folder)
    with pytest.raises(dk.BadInput, match=r"a folder without config\.json"):
        dk.export(tmp_path, out=tmp_path / "m.onnx")


# --- embeddings ---


@pytest.fixture(scope="module")
def sentences(bert: Path) -> Path:
    """As sentence-transformers writes a folder: the encoder, its tokenizer, and how it pools."""
    torch.manual_seed(1)
    folder = bert_of("BertModel", bert.parent / "sentences", bert)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    named = [{"path": path, "type": f"sentence_transformers.models.{n}"} for path, n in parts]
    (folder / "modules.json").write_text(json.dumps(named))
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(modes))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    return folder


@pytest.mark.parametrize("pooling", [None, "cls"])
def test_an_embedding_is_pooled_as_its_folder_or_the_user_says(
    sentences: Path, pooling: str | None, tmp_path: Path
) -> None:
    import transformers

    made = dk.export(sentences, out=tmp_path / "e.onnx", task="embed", pooling=pooling)
    compares = installed("sentence_transformers") or pooling is not None
    assert any("not compared with sentence-transformers" in n for n in made.notes) is not compares
    assert made.manifest.task.text.max_length == 12
    ids = np.array([[2, 4, 5, 0], [2, 5, 5, 6]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
    model = transformers.BertModel.from_pretrained(sentences).eval()
    with torch.inference_mode():
        tokens = model(torch.from_numpy(ids), torch.from_numpy(mask)).last_hidden_state.numpy()
    means = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    wanted = tokens[:, 0] if pooling else means
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    with dk.load(made.path, "cpu") as engine:
        given = {spec.name: feeds[spec.name] for spec in engine.inputs}
        np.testing.assert_allclose(engine(given)["embedding"], wanted, atol=2e-6)


@pytest.mark.parametrize(
    ("part", "content", "reason"),
    [
        ("modules.json", [{"path": "2_Dense", "type": "models.Dense"}], "2_Dense is not offered"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            "1_Pooling is not offered: pooling_mode_max_tokens",
        ),
    ],
)
def test_what_a_folder_asks_beyond_that_is_refused(
    sentences: Path, part: str, content: Any, reason: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(sentences, tmp_path / "s")
    (folder / part).write_text(json.dumps(content))
    with pytest.raises(dk.BadInput, match=reason) as caught:
        dk.export(folder, out=tmp_path / "e.onnx", task="embed")
    assert "`pooling`: mean or cls" in str(caught.value.hint)


# --- other folders ---

HEARS: dict[str, Any] = {
    "d_model": 8,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 1 for side in ("encoder", "decoder")},
    "vocab_size": 32,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "pad_token_id": 0,
    "eos_token_id": 2,
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 20,
}
ONE = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
CONFORMER = {"vocab_size": 9, "feature_projection_input_dim": 40, "conv_depthwise_kernel_size": 3}
NOT_TEXT: dict[str, tuple[dict[str, Any], str]] = {
    "WhisperForConditionalGeneration": (
        HEARS,
        "input_features:float32[N,16,100] decoder_input_ids:int64[N,U]",
    ),
    "ASTForAudioClassification": (
        {**ONE, "num_mel_bins": 32, "max_length": 64},
        "input_values:float32[N,64,32]",
    ),
    "Wav2Vec2BertModel": ({**ONE, **CONFORMER}, "input_features:float32[N,T,40]"),
    "ViTForImageClassification": (
        {**ONE, "image_size": 16, "patch_size": 8},
        "pixel_values:float32[N,3,16,16]",
    ),
}


@pytest.mark.parametrize("name", NOT_TEXT)
def test_the_inputs_of_a_folder_are_those_of_its_model(name: str, tmp_path: Path) -> None:
    settings, specs = NOT_TEXT[name]
    kind = of_transformers(name)
    kind(kind.config_class(**settings)).save_pretrained(tmp_path)
    assert " ".join(map(str, load_folder(tmp_path, None, ()).inputs)) == specs


def test_a_live_model_of_images_has_its_own_configuration(tmp_path: Path) -> None:
    names = {0: "indoors", 1: "sunny", 2: "people"}
    more = {"id2label": names, "problem_type": "multi_label_classification"}
    config = of_transformers("ViTConfig")(**ONE, image_size=8, patch_size=8, **more)
    model = of_transformers("ViTForImageClassification")(config).eval()
    inputs, image = ["pixel_values:float32[N,3,8,8]"], np.full((1, 8, 8, 3), 255, np.uint8)
    (tmp_path / "p.toml").write_text("mean = [0, 0, 0]\nstd = [1, 1, 1]\n")
    how = {"inputs": inputs, "preprocess": str(tmp_path / "p.toml"), "task": "classify"}
    made = dk.export(model, out=tmp_path / "v.onnx", **how)
    with torch.inference_mode():
        expected = model(torch.ones(1, 3, 8, 8)).logits.sigmoid().numpy()
    with dk.load(made.path, "cpu") as engine:
        found = engine({"pixel_values": image})["scores"]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert made.manifest.task.labels == tuple(names.values())


# --- Lightning ---


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 2)
        self.dropout = dropout

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


def lightning(path: Path, **more: Any) -> dict[str, Any]:
    """Write a checkpoint as Lightning does, with a loss that has weights of its own."""
    weights = {f"model.{name}": value for name, value in Net(8).state_dict().items()}
    document = {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {**weights, "loss.weight": torch.ones(2)},
        "hyper_parameters": {"hidden": 8, "lr": 1e-3},
        **more,
    }
    torch.save(document, path)
    return {"model": path, "arch": f"{__file__}:Net", "inputs": ["x:float32[N,4]"]}


@pytest.mark.parametrize("own_dict", [False, True])
def test_a_lightning_checkpoint_is_built_with_its_hyper_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_dict: bool
) -> None:
    """Lightning's own class of dict is read without Lightning."""
    name = "lightning.fabric.utilities.data"
    module = ModuleType(name)
    kind = type("AttributeDict", (dict,), {"__module__": name})
    module.AttributeDict = kind  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for end in range(1, 5):
            patch.setitem(sys.modules, ".".join(name.split(".")[:end]), module)
        values = {"hyper_parameters": kind(hidden=8)} if own_dict else {}
        given = lightning(tmp_path / "last.ckpt", **values)
    made = dk.export(**given)
    assert made.path == tmp_path / "last.onnx"
    assert made.manifest.evidence.source.kind == "Lightning"
    assert made.manifest.evidence.source.ran_pickle is False
    notes = "\n".join(made.notes)
    assert "hidden=8" in notes
    assert "under 'model.'; not used: loss.weight" in notes


@pytest.mark.parametrize(
    ("more", "alone", "reason"),
    [
        ({}, True, WHAT_IT_IS),
        ({"hyper_parameters": {"lr": 1.0}}, False, "missing a required argument: .hidden."),
        ({"callbacks": {"mine": print}}, False, "would run Python code"),
    ],
)
def test_a_lightning_checkpoint_that_lacks_something_or_runs_code_is_refused(
    tmp_path: Path, more: dict[str, Any], alone: bool, reason: str
) -> None:
    given = lightning(tmp_path / "m.ckpt", **more)
    with pytest.raises(dk.BadInput, match=reason):
        dk.export(given["model"]) if alone else dk.export(**given)


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
    made = of_transformers(name)(**settings)
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


SEGFORMER: dict[str, Any] = {
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 1, 1],
    "decoder_hidden_size": 8,
    "num_labels": 3,
}


def segformer(folder: Path, kind: str, **more: Any) -> Path:
    torch.manual_seed(0)
    name = "SemanticSegmentation" if kind == SEGMENT else "ImageClassification"
    config = of_transformers("SegformerConfig")(**SEGFORMER, **more)
    of_transformers(f"SegformerFor{name}")(config).save_pretrained(folder)
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
def test_answers_are_those_of_transformers(
    kind: str, more: dict[str, Any], bert: Path, tmp_path: Path
) -> None:
    if kind == TEXT_CLASSIFY:
        folder = changed(bert, tmp_path / "model", more)
    else:
        folder = segformer(tmp_path / "model", kind, **more)
    loaded = load_folder(folder, None, ())
    job = with_task(loaded, folder, read_options(kind), None, {})
    assert not [note for note in job.notes if "not compared" in note]
    other = copy.deepcopy(own_module(loaded))
    for weight in other.parameters():
        torch.nn.init.normal_(weight)
    with pytest.raises(BadInput, match=f"`task` {kind}: its answers are not those of transformers"):
        check_answers(job.task, job.loaded, other, folder, pooled=False)
    (note,) = check_answers(job.task, job.loaded, other, None, pooled=False)
    assert "not compared with transformers' own answers: a live module has no folder" in note
