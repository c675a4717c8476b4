"""Building the user's architecture and filling it: what fits, what is converted, what is named."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput, NotFound  # noqa: E402
from deploykit.engines.torch.weights import build_module, copy_weights  # noqa: E402

pytestmark = pytest.mark.torch

ARCH = """
import torch
Two = lambda: torch.nn.Linear(4, 2)
ready = torch.nn.Linear(4, 2)
number = 3
not_a_module = lambda: 3
def needy(width, depth, *extra, bias=True, **more):
    pass
def broken():
    raise ZeroDivisionError("no\\nmore")
"""
FILE = Path("w.pt")


@pytest.fixture
def arch(tmp_path: Path) -> Path:
    path = tmp_path / "arch.py"
    path.write_text(ARCH, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("number", BadInput, "is a int, a callable is needed"),
        ("not_a_module", BadInput, "returned a int, not a torch.nn.Module"),
        ("absent", NotFound, "has no 'absent'"),
        ("needy", BadInput, "needs the arguments width, depth$"),
        ("broken", BadInput, "arch.py:broken: ZeroDivisionError: no$"),
    ],
)
def test_what_builds_no_module_is_named(
    arch: Path, name: str, error: type[BadInput], told: str
) -> None:
    with pytest.raises(error, match=told) as caught:
        build_module(f"{arch}:{name}")
    assert ("./file.py:build" in str(caught.value.hint)) is (name == "needy")
    for good in ("Two", "ready"):
        assert isinstance(build_module(f"{arch}:{good}")[0], torch.nn.Linear)


def test_a_torchvision_built_for_another_torch_is_imported() -> None:
    """In a process of its own: the operators, once declared, stay."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    code = (
        "from deploykit.engines.torch.weights import build_module\n"
        "print(type(build_module('torchvision.models:squeezenet1_1')[0]).__name__)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "SqueezeNet", ran.stderr


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(4, 2)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight


def linears(count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(count)])


NOT_FITTING: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any], str]] = {
    "names": (
        lambda: linears(20),
        {f"extra_{i}": torch.zeros(1) for i in range(12)},
        "missing 0.weight, 0.bias and 38 more; unexpected extra_0, extra_1 and 10 more",
    ),
    "shapes": (
        lambda: linears(6),
        {key: torch.zeros(7, 3) for key in linears(6).state_dict()},
        (
            "size mismatch: 0.weight [7,3] in the file, [4,4] in the model, "
            "0.bias [7,3] in the file, [4] in the model and 10 more"
        ),
    ),
    "shapes and names": (
        lambda: torch.nn.Linear(4, 2),
        {"weight": torch.zeros(3, 4), "scale": torch.zeros(1)},
        "size mismatch: weight [3,4] in the file, [2,4] in the model; missing bias; unexpec",
    ),
    "a prefix of some names": (
        lambda: torch.nn.Linear(4, 2),
        {"module.weight": torch.zeros(2, 4), "bias": torch.zeros(2)},
        "missing weight; unexpected module.weight",
    ),
    "tied": (Tied, {"x": torch.ones(1)}, "missing table.weight, head.weight; unexpected x"),
}


@pytest.mark.parametrize("case", NOT_FITTING)
def test_weights_that_do_not_fit_are_listed_two_at_most(case: str) -> None:
    build, weights, said = NOT_FITTING[case]
    with pytest.raises(BadInput) as caught:
        copy_weights(FILE, build(), weights)
    assert str(caught.value).startswith(f"w.pt: weights do not fit the model: {said}")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_a_wrappers_name_prefix_is_removed_with_a_note(prefix: str) -> None:
    module, source = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    notes = copy_weights(FILE, module, {prefix + k: v for k, v in source.state_dict().items()})
    assert torch.equal(module.weight, source.weight)
    assert notes
    assert all("from the front of every name" in note for note in notes)
    averaged = torch.optim.swa_utils.AveragedModel(linears(1))
    assert "AveragedModel" in copy_weights(FILE, linears(1), averaged.state_dict())[0]
    assert copy_weights(FILE, Own(), Own().state_dict()) == ()  # which has it itself


def test_tied_weights_may_be_missing_from_the_file() -> None:
    """As transformers does in `.safetensors` for tied embeddings."""
    module = Tied()
    notes = copy_weights(FILE, module, {"table.weight": torch.ones(5, 3)})
    assert bool((module.head.weight == 1).all())
    assert notes == ("not in the file, as they share another's weights: head.weight",)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_float16_weights_are_converted_to_the_models_type_with_a_note(dtype: str) -> None:
    module, source = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).to(getattr(torch, dtype))
    notes = copy_weights(FILE, module, source.state_dict())
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight, source.weight.float())
    assert notes == (f"2 tensors converted from {dtype} to float32",)


def test_integer_weights_are_not_taken_as_floats() -> None:
    """A quantised file has other numbers in the same place; torch would convert them silently."""
    weights = {"weight": torch.zeros(2, 4, dtype=torch.int8), "bias": torch.zeros(2)}
    with pytest.raises(BadInput, match="weight is int8 in the file, float32 in the model"):
        copy_weights(FILE, torch.nn.Linear(4, 2), weights)


def test_a_lazy_module_gets_copies_of_the_files_shapes(tmp_path: Path) -> None:
    """The file may change or go once it is loaded."""
    path = tmp_path / "w.pt"
    torch.save(torch.nn.Linear(300, 300).state_dict(), path)
    mapped = torch.load(path, mmap=True, weights_only=True)
    module = torch.nn.LazyLinear(300)
    copy_weights(path, module, mapped)
    assert torch.equal(module.weight, mapped["weight"])
    assert module.weight.data_ptr() != mapped["weight"].data_ptr()
