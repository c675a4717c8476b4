"""Open a Hugging Face folder as a module with its specs.

The model is a class of the installed transformers; code in the folder never runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.files import check_readable, read_json
from deploykit.core.tensors import TensorSpec, make_spec
from deploykit.engines.data.examples import Example
from deploykit.engines.torch.files import Content, list_names, module_errors, quiet
from deploykit.engines.torch.loaded import Loaded, describe_module, undescribed
from deploykit.engines.torch.outputs import parameter_names

torch = require("torch")

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
PROCESSOR = "preprocessor_config.json"
_USUAL_CHANNELS = 3


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files. Raises BadInput if there are none."""
    if not (folder / CONFIG).is_file():
        raise BadInput(
            f"{folder}: is a folder without {CONFIG}",
            hint="name a file, or a folder that transformers' save_pretrained wrote",
        )
    index, whole = folder / INDEX, folder / "model.safetensors"
    if whole.is_file() or not index.is_file():
        if not whole.is_file():
            raise BadInput(
                f"{folder}: has no model.safetensors",
                hint="save the model again with save_pretrained(folder), which writes one",
            )
        return [whole]
    names = set(read_settings(folder, INDEX).get("weight_map", {}).values())
    return [check_readable(folder / Path(str(name)).name) for name in sorted(names)]


def load_folder(
    folder: Path, arch: str | None, inputs: Sequence[TensorSpec], example: Example | None = None
) -> Loaded:
    """Load the model that config.json names under `architectures`, in float32.

    `inputs`: the specs; if empty, the model's main input decides. Raises BadInput,
    MissingExtra.
    """
    if arch is not None:
        raise BadInput(
            f"{folder}: config.json names the model, so `arch` {arch} has nothing to build",
            hint=f"leave `arch` out, or export {folder / 'model.safetensors'} with it",
        )
    weight_files(folder)
    names = read_settings(folder, CONFIG).get("architectures") or []
    transformers = require("transformers")
    name = str(names[0]) if isinstance(names, list) and names else ""
    with module_errors(folder):
        found = getattr(transformers, name, None)
    if not hasattr(found, "from_pretrained"):
        if not name:
            raise undescribed(f"{folder / CONFIG} (`architectures`)", arch=True, inputs=not inputs)
        raise BadInput(
            f"{folder}: transformers {transformers.__version__} has no model '{name}'",
            hint="export its model.safetensors with `arch` and `inputs`, or upgrade transformers",
        )
    module = _load(folder, found)
    specs = tuple(inputs) or _inputs(folder, module)
    with module_errors(folder):
        content = Content("Hugging Face", module)
        loaded = describe_module(folder, content, specs, example=example)
    return replace(loaded, model_class=f"transformers.{name}")


@contextmanager
def without_messages() -> Iterator[None]:
    """Keep transformers from writing messages and progress bars."""
    logging = require("transformers.utils.logging")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet("transformers", "sentence_transformers"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _load(folder: Path, found: Any) -> Any:
    with module_errors(f"{folder}: transformers cannot load it"), without_messages():
        module, report = found.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    wrong = {
        key: sorted(map(str, report.get(f"{key}_keys") or ())) for key in ("missing", "mismatched")
    }
    if any(wrong.values()):  # transformers fills these with random numbers
        reasons = [f"{key} {list_names(names, 2)}" for key, names in wrong.items() if names]
        raise BadInput(f"{folder}: weights do not fit the model: {'; '.join(reasons)}")
    return module


def _inputs(folder: Path, module: Any) -> tuple[TensorSpec, ...]:
    main, known = str(getattr(module, "main_input_name", "")), parameter_names(module)
    after = [make_spec(name, "int64", ["N", "U"]) for name in known if name == "decoder_input_ids"]
    if main == "input_ids":
        names = [name for name in ("input_ids", "attention_mask") if name in known]
        return (*(make_spec(name, "int64", ["N", "T"]) for name in names), *after)
    shape = _shape_of(main, module.config, read_settings(folder, PROCESSOR))
    if shape is None:
        where = f"{folder} ({type(module).__name__}, main input '{main}')"
        raise undescribed(where, inputs=True)
    return (make_spec(main, "float32", ["N", *shape]), *after)


def _shape_of(main: str, config: Any, processor: dict[str, Any]) -> list[int | str] | None:
    """Return the shape of one sample of the input `main`; None where the folder does not say it.

    `processor`: the settings of the folder's own processor of images.
    """
    inner = (getattr(config, name, None) for name in ("vision_config", "audio_config"))
    parts = [part for part in (config, *inner) if part is not None]

    def stated(name: str) -> Any:
        found = (getattr(part, name, None) for part in parts)
        return next((each for each in found if each is not None), None)

    size, bins = stated("image_size"), stated("num_mel_bins")
    if size is None:
        size = processor.get("crop_size") or processor.get("size")
    if main == "pixel_values":
        size = [size.get("height"), size.get("width")] if isinstance(size, dict) else size
        pair = [size, size] if isinstance(size, int) else list(size or ())
        whole = len(pair) == 2 and all(type(each) is int for each in pair)
        return [stated("num_channels") or _USUAL_CHANNELS, *pair] if whole else None
    if main == "input_values":  # sound itself, but for a model of spectrograms
        return [stated("max_length"), bins] if bins else ["T"]
    if main != "input_features":
        return None
    width, each = stated("feature_projection_input_dim"), stated("input_feat_per_channel")
    if width or each:
        return ["T", width or each * (stated("input_channels") or 1)]
    if bins and stated("max_source_positions"):  # a convolution halves Whisper's spectrograms
        return [bins, 2 * stated("max_source_positions")]
    return [1, "T", bins] if bins else None


def load_processor(folder: Path, kind: str) -> Any:
    """Load the processor of images or sound in `folder`. Raises BadInput, MissingExtra."""
    with module_errors(folder / PROCESSOR), without_messages():
        library = getattr(require("transformers"), kind)
        return library.from_pretrained(folder, local_files_only=True)


def read_settings(folder: Path | None, name: str) -> dict[str, Any]:
    """Return the object in the JSON file `name` of `folder`; {} where there is none."""
    path = folder / name if folder else None
    found = read_json(path) if path is not None and path.is_file() else {}
    return found if isinstance(found, dict) else {}
