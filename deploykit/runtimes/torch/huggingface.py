"""Open a Hugging Face folder: config.json and weights in the safetensors format.

The model is a class of the installed transformers; code that comes with a folder is never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.files import check_readable
from deploykit.core.tensors import TensorSpec, make_spec
from deploykit.runtimes.torch.files import module_errors, quiet
from deploykit.runtimes.torch.loaded import Loaded, describe_module, undescribed
from deploykit.runtimes.torch.operators import with_torchvision
from deploykit.runtimes.torch.outputs import parameter_names
from deploykit.runtimes.torch.weights import list_names

torch = require("torch")

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_USUAL_CHANNELS = 3


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files. Raises BadInput where there are none."""
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
    names = set(_read_json(index).get("weight_map", {}).values())
    return [check_readable(folder / Path(str(name)).name) for name in sorted(names)]


def load_folder(folder: Path, arch: str | None, inputs: Sequence[TensorSpec]) -> Loaded:
    """The model that config.json names under `architectures`, in float32.

    `inputs`: the specs; empty derives them from the model's main input. Raises BadInput,
    MissingExtra.
    """
    if arch is not None:
        raise BadInput(
            f"{folder}: config.json names the model, so `arch` {arch} has nothing to build",
            hint=f"leave `arch` out, or export {folder / 'model.safetensors'} with it",
        )
    weight_files(folder)
    names = _read_json(folder / CONFIG).get("architectures") or []
    transformers = require("transformers")
    name = str(names[0]) if isinstance(names, list) and names else ""
    with module_errors(folder):
        found = with_torchvision(lambda: getattr(transformers, name, None))
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
        loaded = describe_module(folder, module, specs, "Hugging Face")
    return replace(loaded, model_class=f"transformers.{name}")


def _load(folder: Path, found: Any) -> Any:
    with module_errors(f"{folder}: transformers cannot load it"), quiet("transformers"), _no_bars():
        module, report = with_torchvision(
            lambda: found.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        )
    wrong = {
        key: sorted(map(str, report.get(f"{key}_keys") or ())) for key in ("missing", "mismatched")
    }
    if any(wrong.values()):  # transformers would have filled them with random numbers
        reasons = [f"{key} {list_names(names)}" for key, names in wrong.items() if names]
        raise BadInput(f"{folder}: weights do not fit the model: {'; '.join(reasons)}")
    return module


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the terminal."""
    logging = require("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _inputs(folder: Path, module: Any) -> tuple[TensorSpec, ...]:
    """Specs derived from the model's main input. Raises BadInput where there is no rule for it."""
    main = str(getattr(module, "main_input_name", ""))
    known = parameter_names(module)
    if main == "input_ids" and "decoder_input_ids" not in known:
        names = [name for name in ("input_ids", "attention_mask") if name in known]
        return tuple(make_spec(name, "int64", ["N", "T"]) for name in names)
    if main == "pixel_values":
        size = _image_size(folder, module.config)
        if size is not None:
            channels = _setting(module.config, "num_channels") or _USUAL_CHANNELS
            return (make_spec(main, "float32", ["N", channels, *size]),)
    if main == "input_values":
        return (make_spec(main, "float32", ["N", "T"]),)
    raise undescribed(f"{folder} ({type(module).__name__}, main input '{main}')", inputs=True)


def _image_size(folder: Path, config: Any) -> tuple[int, int] | None:
    """Height and width: from the config, else from the image processor's file."""
    found = _setting(config, "image_size")
    path = folder / "preprocessor_config.json"
    if found is None and path.is_file():
        settings = _read_json(path)
        found = settings.get("crop_size") or settings.get("size")
    if isinstance(found, dict):
        found = [found.get("height"), found.get("width")]
    pair = [found, found] if isinstance(found, int) else found
    if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(n) is int for n in pair):
        return pair[0], pair[1]
    return None


def _setting(config: Any, name: str) -> Any:
    """A setting of the config, or of its part for images."""
    for part in (config, getattr(config, "vision_config", None)):
        if getattr(part, name, None) is not None:
            return getattr(part, name)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(check_readable(path).read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as exc:
        raise BadInput(f"{path}: is not readable JSON: {first_line(exc)}") from exc
    if not isinstance(found, dict):
        raise BadInput(f"{path}: is not a JSON object")
    return found
