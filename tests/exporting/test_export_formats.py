"""`dk.export` of a Hugging Face folder and of a Lightning checkpoint."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import deploykit as dk  # noqa: E402
from deploykit.engines.torch.files import with_torchvision  # noqa: E402
from deploykit.engines.torch.folder import load_folder  # noqa: E402

pytestmark = pytest.mark.torch

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, hidden, dropout=0.0):
        super().__init__()
        self.first = torch.nn.Linear(4, hidden)
        self.drop = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(hidden, 2)

    def forward(self, x):
        return self.last(self.drop(self.first(x)))
"""
SPEC = "x:float32[N,4]"


@pytest.fixture(scope="module")
def transformers() -> Any:
    from deploykit.engines.torch.files import with_torchvision

    pytest.importorskip("transformers", reason="transformers is not installed")
    import transformers

    for name in ("BertForSequenceClassification", "ViTForImageClassification"):
        with_torchvision(partial(getattr, transformers, name))
    return transformers


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.support.bert import save_tiny_bert

    return save_tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def vit(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
    )
    folder = tmp_path_factory.mktemp("models") / "vit"
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


def test_a_bert_folder_takes_ids_and_a_mask_of_any_length(bert: Path) -> None:
    made = dk.export(str(bert))
    assert made.path == bert.parent / "bert.onnx"
    assert [str(spec) for spec in made.manifest.inputs] == [
        "input_ids:int64[N,T]",
        "attention_mask:int64[N,T]",
    ]
    source = made.manifest.evidence.source
    assert (source.kind, source.model_class) == (
        "Hugging Face",
        "transformers.BertForSequenceClassification",
    )
    assert made.parity is not None
    assert made.parity.passed


def test_transformers_shows_no_progress_of_its_own(
    transformers: Any, bert: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load_folder(bert, None, ())
    assert "Loading weights" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled()  # the caller's own loads show one


def test_a_vit_folder_takes_images_of_the_size_in_its_config(vit: Path, tmp_path: Path) -> None:
    made = dk.export(vit, out=tmp_path / "vit.onnx")
    assert [str(spec) for spec in made.manifest.inputs] == ["pixel_values:float32[N,3,16,16]"]


WHISPER: dict[str, Any] = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 1,
    "decoder_attention_heads": 1,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
HEARS = {**WHISPER, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 20}
ONE = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
NOT_TEXT: dict[str, tuple[str, dict[str, Any], str]] = {
    "Whisper": (
        "WhisperForConditionalGeneration",
        HEARS,
        "input_features:float32[N,16,100] decoder_input_ids:int64[N,U]",
    ),
    "its classifier": ("WhisperForAudioClassification", HEARS, "input_features:float32[N,16,100]"),
    "spectrograms": (
        "ASTForAudioClassification",
        {**ONE, "num_mel_bins": 32, "max_length": 64},
        "input_values:float32[N,64,32]",
    ),
    "features of any length": (
        "Wav2Vec2BertModel",
        {
            **ONE,
            "vocab_size": 9,
            "feature_projection_input_dim": 40,
            "conv_depthwise_kernel_size": 3,
        },
        "input_features:float32[N,T,40]",
    ),
    "speech to text": (
        "Speech2TextForConditionalGeneration",
        {**WHISPER, "input_feat_per_channel": 20, "conv_channels": 8},
        "input_features:float32[N,T,20] decoder_input_ids:int64[N,U]",
    ),
    "encoder and decoder": (
        "BartForConditionalGeneration",
        WHISPER,
        "input_ids:int64[N,T] attention_mask:int64[N,T] decoder_input_ids:int64[N,U]",
    ),
}


@pytest.mark.parametrize("case", NOT_TEXT)
def test_the_inputs_of_a_folder_are_those_of_its_model(
    case: str, transformers: Any, tmp_path: Path
) -> None:
    name, settings, specs = NOT_TEXT[case]
    kind = with_torchvision(lambda: getattr(transformers, name))
    kind(kind.config_class(**settings)).save_pretrained(tmp_path)
    assert " ".join(map(str, load_folder(tmp_path, None, ()).inputs)) == specs


def rewritten(folder: Path, to: Path, **changes: object) -> Path:
    """A copy of `folder` with other values in its config.json; None removes a key."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    config = {k: v for k, v in {**config, **changes}.items() if v is not None}
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_a_config_without_an_architecture_asks_for_all_missing_options(
    bert: Path, tmp_path: Path
) -> None:
    folder = rewritten(bert, tmp_path / "m", architectures=None)
    with pytest.raises(dk.BadInput, match="what the model is or what its inputs are") as caught:
        dk.export(folder)
    assert "`arch`" in str(caught.value.hint)
    assert "`inputs`" in str(caught.value.hint)


def test_an_unknown_architecture_is_refused_without_running_the_folders_code(
    bert: Path, tmp_path: Path
) -> None:
    folder = rewritten(
        bert,
        tmp_path / "m",
        architectures=["Mine"],
        auto_map={"AutoModel": "modeling_mine.Mine", "AutoConfig": "modeling_mine.Config"},
    )
    (folder / "modeling_mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(dk.BadInput, match="has no model 'Mine'"):
        dk.export(folder)


def test_missing_weights_are_refused_not_replaced_by_random_ones(
    bert: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = rewritten(bert, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["classifier.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(dk.BadInput, match=r"missing classifier\.bias"):
        dk.export(folder)


def test_a_folder_without_safetensors_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = rewritten(bert, tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(dk.BadInput, match=r"no model\.safetensors"):
        dk.export(folder)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput, match=r"a folder without config\.json"):
        dk.export(tmp_path, out=tmp_path / "m.onnx")


def lightning(path: Path, prefix: str = "model.", **more: Any) -> Path:
    """A checkpoint as Lightning writes it, with a loss that has weights of its own."""
    (path.parent / "net.py").write_text(NET)
    scope: dict[str, Any] = {}
    exec(NET, scope)
    weights = {f"{prefix}{name}": v for name, v in scope["Net"](8).state_dict().items()}
    document = {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {**weights, "loss.weight": torch.ones(2)},
        "hyper_parameters": {"hidden": 8, "lr": 1e-3},
        **more,
    }
    torch.save(document, path)
    return path


def test_a_lightning_checkpoint_is_built_with_its_hyper_parameters(tmp_path: Path) -> None:
    path = lightning(tmp_path / "last.ckpt")
    made = dk.export(path, arch=f"{tmp_path}/net.py:Net", inputs=[SPEC])
    assert made.path == tmp_path / "last.onnx"
    assert made.manifest.evidence.source.kind == "Lightning"
    assert made.manifest.evidence.source.ran_pickle is False
    notes = "\n".join(made.notes)
    assert "hidden=8" in notes
    assert "under 'model.'; not used: loss.weight" in notes


def test_the_dict_class_of_lightning_is_read_without_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "lightning.fabric.utilities.data"
    module = ModuleType(name)
    kind = type("AttributeDict", (dict,), {"__module__": name})
    module.AttributeDict = kind  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for end in range(1, 5):
            patch.setitem(sys.modules, ".".join(name.split(".")[:end]), module)
        path = lightning(tmp_path / "m.ckpt", hyper_parameters=kind(hidden=8))
    made = dk.export(path, arch=f"{tmp_path}/net.py:Net", inputs=[SPEC])
    assert any("hidden=8" in note for note in made.notes)


def test_one_message_lists_everything_that_a_checkpoint_lacks(tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput, match="what the model is or what its inputs are") as caught:
        dk.export(lightning(tmp_path / "m.ckpt"))
    assert "`arch`" in str(caught.value.hint)
    assert "`inputs`" in str(caught.value.hint)


def test_arguments_that_the_hyper_parameters_lack_are_named(tmp_path: Path) -> None:
    path = lightning(tmp_path / "m.ckpt", hyper_parameters={"lr": 1.0})
    with pytest.raises(dk.BadInput, match="needs the arguments hidden"):
        dk.export(path, arch=f"{tmp_path}/net.py:Net", inputs=[SPEC])


def test_code_in_a_lightning_checkpoint_does_not_run(tmp_path: Path) -> None:
    path = lightning(tmp_path / "m.ckpt", callbacks={"mine": print})
    with pytest.raises(dk.BadInput, match="would run Python code"):
        dk.export(path, arch=f"{tmp_path}/net.py:Net", inputs=[SPEC])
