"""`export --task text-classify`: a Hugging Face folder with its tokenizer, as one artefact."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch")
needs("onnxscript", "transformers", "tokenizers")

import deploykit as dk  # noqa: E402
from deploykit.core.artefact import Artefact  # noqa: E402
from deploykit.core.extras import installed  # noqa: E402
from deploykit.core.files import sha256  # noqa: E402
from deploykit.core.task import TaskOutputs, TextInput  # noqa: E402

pytestmark = pytest.mark.torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers

    from tests.support.bert import save_tiny_bert

    torch.manual_seed(0)
    folder = save_tiny_bert(
        tmp_path_factory.mktemp("text") / "bert",
        id2label={0: "negative", 1: "neutral", 2: "positive"},
        label2id={"negative": 0, "neutral": 1, "positive": 2},
    )
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 20}')
    return folder


@pytest.fixture(scope="module")
def made(bert: Path) -> Any:
    return dk.export(bert, out=bert.parent / "m.onnx", task="text-classify")


def test_the_folders_own_labels_tokenizer_and_length_are_taken(made: Any, bert: Path) -> None:
    task = made.manifest.task
    copied = made.path.with_name("m.onnx.tokenizer.json")
    assert task.labels == ("negative", "neutral", "positive")
    assert task.outputs == TaskOutputs(scores="scores")
    assert task.text == TextInput(
        ids="input_ids",
        tokenizer=copied.name,
        sha256=sha256(bert / "tokenizer.json"),
        max_length=20,
        mask="attention_mask",
    )
    assert copied.read_bytes() == (bert / "tokenizer.json").read_bytes()


def test_the_scores_are_those_of_the_model_in_transformers(made: Any, bert: Path) -> None:
    import transformers

    ids = np.array([[2, 4, 6, 3], [2, 5, 3, 0]], np.int64)
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.int64)
    model = transformers.BertForSequenceClassification.from_pretrained(bert).eval()
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits
    with dk.load(made.path, "cpu") as engine:
        found = engine({"input_ids": ids, "attention_mask": mask})["scores"]
    np.testing.assert_allclose(found, logits.softmax(1).numpy(), atol=2e-6)


def test_the_tokenizer_goes_along_with_what_is_made_of_the_model(made: Any, bert: Path) -> None:
    kept = made.manifest.task
    for result in (
        dk.quantize(made.path, "fp16", out=bert.parent / "h.onnx"),
        dk.build(made.path, "cpu", out=bert.parent / "b.onnx"),
    ):
        found = Artefact(result.path).manifest
        assert found is not None
        assert found.task == kept.named_after(result.path.name)
        copied = result.path.with_name(found.task.text.tokenizer)
        assert sha256(copied) == kept.text.sha256
    dk.export(bert, out=bert.parent / "m.onnx", task="text-classify")  # replaces what it wrote


def test_a_tokenizer_that_was_changed_is_not_carried_along(made: Any, tmp_path: Path) -> None:
    for file in made.path.parent.glob("m.onnx*"):
        shutil.copyfile(file, tmp_path / file.name)
    changed = tmp_path / "m.onnx.tokenizer.json"
    changed.write_text(changed.read_text() + " ")
    with pytest.raises(dk.BadInput, match=r"m\.onnx\.tokenizer\.json: is not the file that"):
        dk.quantize(tmp_path / "m.onnx", "fp16", out=tmp_path / "h.onnx")
    assert not (tmp_path / "h.onnx").exists()


def folder_with(bert: Path, folder: Path, **files: str | None) -> Path:
    """A copy of the model with other files, None for none."""
    shutil.copytree(bert, folder)
    for name, text in files.items():
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "given", "reason"),
    [
        ({"tokenizer": None}, {}, "needs the model's tokenizer; .*tokenizer.json: no such file"),
        ({"tokenizer": "{}"}, {}, "tokenizer.json: is not a tokenizer.json"),
        ({"tokenizer": "{"}, {}, "tokenizer.json: is not valid JSON"),
        ({}, {"max_length": 65}, "`max_length` 65: the model has 64 positions"),
        ({}, {"max_length": 1}, "`max_length` must be from 2 to 1048576, got 1"),
        ({}, {"labels": ["a"]}, "holds 1 labels, the model has 3 classes"),
        ({}, {"task": "classify"}, "is for one image; the model takes input_ids"),
        ({}, {"preprocess": "imagenet"}, "`preprocess` is for an image"),
        ({"tokenizer": '{"model": {"type": "Foo"}}'}, {}, "tokenizer.json: is not a tokenizer: "),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    bert: Path, tmp_path: Path, files: dict[str, str | None], given: dict[str, Any], reason: str
) -> None:
    folder = folder_with(bert, tmp_path / "bert", **files)
    with pytest.raises(dk.BadInput, match=reason):
        dk.export(folder, out=tmp_path / "x.onnx", **{"task": "text-classify", **given})
    assert not (tmp_path / "x.onnx").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(bert: Path, tmp_path: Path) -> None:
    """One of them, in a text of any client, would fail in the engine."""
    tokenizer = json.loads((bert / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["new"] = 32
    folder = folder_with(bert, tmp_path / "bert", tokenizer=json.dumps(tokenizer))
    with pytest.raises(dk.BadInput, match="has token 32, the model's tokens are 0 to 31"):
        dk.export(folder, out=tmp_path / "x.onnx", task="text-classify")


def test_a_task_for_images_names_the_one_for_text(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput) as caught:
        dk.export(bert, out=tmp_path / "x.onnx", task="classify")
    assert caught.value.hint == "for a text: `task` embed or text-classify"


def test_several_labels_at_once_have_probabilities_of_their_own(bert: Path, tmp_path: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    folder = folder_with(bert, tmp_path / "bert", config=json.dumps(config))
    made = dk.export(folder, out=tmp_path / "x.onnx", task="text-classify", max_length=8)
    ids = np.array([[2, 4, 6, 3]], np.int64)
    with dk.load(made.path, "cpu") as engine:
        found = engine({"input_ids": ids, "attention_mask": np.ones_like(ids)})["scores"]
    assert made.manifest.task.text.max_length == 8
    assert abs(found.sum() - 1) > 1e-2  # no softmax


def test_numbers_of_a_regression_are_no_classes(bert: Path, tmp_path: Path) -> None:
    config = json.loads((bert / "config.json").read_text()) | {"problem_type": "regression"}
    folder = folder_with(bert, tmp_path / "bert", config=json.dumps(config))
    with pytest.raises(dk.BadInput, match="the outputs are numbers, not classes"):
        dk.export(folder, out=tmp_path / "x.onnx", task="text-classify")


def test_a_live_model_and_one_of_images_have_their_own_configuration(tmp_path: Path) -> None:
    import transformers

    from deploykit.engines.torch.files import with_torchvision

    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        image_size=8,
        patch_size=8,
        id2label={0: "indoors", 1: "sunny", 2: "people"},
        problem_type="multi_label_classification",
    )
    model = with_torchvision(lambda: transformers.ViTForImageClassification)(config).eval()
    inputs, image = ["pixel_values:float32[N,3,8,8]"], np.full((1, 8, 8, 3), 255, np.uint8)
    (tmp_path / "p.toml").write_text("mean = [0, 0, 0]\nstd = [1, 1, 1]\n")
    how = {"inputs": inputs, "preprocess": str(tmp_path / "p.toml"), "task": "classify"}
    made = dk.export(model, out=tmp_path / "v.onnx", **how)
    with torch.inference_mode():
        expected = model(torch.ones(1, 3, 8, 8)).logits.sigmoid().numpy()
    with dk.load(made.path, "cpu") as engine:
        found = engine({"pixel_values": image})["scores"]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert made.manifest.task is not None
    assert made.manifest.task.labels == ("indoors", "sunny", "people")


@pytest.fixture(scope="module")
def sentences(bert: Path) -> Path:
    """As sentence-transformers writes a folder: the encoder, its tokenizer, and how it pools."""
    from tests.support.bert import save_tiny_bert

    torch.manual_seed(1)
    folder = save_tiny_bert(bert.parent / "sentences", "BertModel")
    shutil.copy(bert / "tokenizer.json", folder)
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
    assert made.manifest.task is not None
    assert made.manifest.task.text is not None
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


@pytest.mark.parametrize(
    "given", [{"task": "text-classify"}, {"task": "embed"}, {"task": "embed", "pooling": "mean"}]
)
def test_two_heads_of_a_text_model_are_refused(
    bert: Path, given: dict[str, str], tmp_path: Path
) -> None:
    """Whether two sentences follow each other is no label, and words' scores are no embedding."""
    from tests.support.bert import save_tiny_bert

    folder = save_tiny_bert(tmp_path / "both", "BertForPreTraining")
    shutil.copy(bert / "tokenizer.json", folder)
    reason = "does not fit transformers' BertForPreTraining: .*seq_relationship_logits"
    with pytest.raises(dk.BadInput, match=reason):
        dk.export(folder, out=tmp_path / "e.onnx", **given)


HEADS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sentences that follow": (
        "BertForNextSentencePrediction",
        {"task": "text-classify"},
        "does not fit transformers' BertForNextSentencePrediction",
    ),
    "scores as a vector": (
        "BertForSequenceClassification",
        {"task": "embed"},
        "does not fit transformers' BertForSequenceClassification: its outputs are logits",
    ),
    "places that nothing fills": (
        "BertForSequenceClassification",
        {"task": "text-classify", "inputs": ["input_ids:int64[N,T]", "position_ids:int64[N,T]"]},
        "nothing fills position_ids",
    ),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_head_of_the_same_shape_is_refused_by_its_name(
    bert: Path, case: str, tmp_path: Path
) -> None:
    from tests.support.bert import save_tiny_bert

    kind, given, reason = HEADS[case]
    folder = save_tiny_bert(tmp_path / "other", kind)
    shutil.copy(bert / "tokenizer.json", folder)
    with pytest.raises(dk.BadInput, match=reason):
        dk.export(folder, out=tmp_path / "e.onnx", **given)


def test_pooling_is_for_embeddings_alone(sentences: Path, tmp_path: Path) -> None:
    for given, reason in (
        ({"task": "text-classify", "pooling": "mean"}, "`pooling` does not go with `task` text"),
        ({"task": "embed", "pooling": "max"}, "`pooling` max: unknown"),
    ):
        with pytest.raises(dk.BadInput, match=reason):
            dk.export(sentences, out=tmp_path / "e.onnx", **given)  # type: ignore[arg-type]
