"""Opening PyTorch files: what is read, what is refused, and that nothing in them runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput, Unsupported  # noqa: E402
from deploykit.core.tensors import TensorSpec, parse_spec  # noqa: E402
from deploykit.runtimes.torch import (  # noqa: E402
    TorchEngine,
    load_module,
    load_weights,
    open_engine,
    parameters,
    save_checkpoint,
)

pytestmark = pytest.mark.torch

INPUT = parse_spec("x:float32[N,4]")
ARCH = """
import torch
Two = lambda: torch.nn.Linear(4, 2)
Three = lambda: torch.nn.Linear(4, 3)
Deep = lambda: torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(20)])
number = 3
not_a_module = lambda: 3
class Pair(torch.nn.Module):
    def forward(self, x, ids):
        return x.sum(1), x[:, :2] + ids[:, :2]
class Odd(torch.nn.Module):
    def forward(self, x):
        return "text"
"""


@pytest.fixture
def arch(tmp_path: Path) -> Path:
    path = tmp_path / "arch.py"
    path.write_text(ARCH, encoding="utf-8")
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pth"
    torch.manual_seed(0)
    torch.save(torch.nn.Linear(4, 2).state_dict(), path)
    return path


def test_a_checkpoint_comes_back_with_its_specs_and_weights(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 2)
    output = parse_spec("y:float32[N,2]")
    save_checkpoint(tmp_path / "m.pt", module, "mine", [INPUT], [output])
    (tmp_path / "arch.py").write_text(ARCH, encoding="utf-8")
    loaded = load_module(tmp_path / "m.pt", arch=f"{tmp_path}/arch.py:Two")
    assert (loaded.inputs, loaded.outputs) == ((INPUT,), (output,))
    assert torch.equal(loaded.module.weight, module.weight)
    assert not loaded.module.training
    assert set(load_weights(tmp_path / "m.pt")) == {"weight", "bias"}


def test_a_checkpoint_of_somebody_elses_recipe_asks_for_the_architecture(tmp_path: Path) -> None:
    """Its text is never taken as a path or module to import."""
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    for name in (f"{tmp_path}/evil.py", "os:system", "../../evil"):
        save_checkpoint(tmp_path / "m.pt", torch.nn.Linear(4, 2), name, [INPUT], [INPUT])
        with pytest.raises(BadInput, match="does not come with deploykit") as caught:
            load_module(tmp_path / "m.pt")
        assert "--arch" in str(caught.value.hint)


def test_a_bare_state_dict_needs_arch_and_inputs(weights: Path, arch: Path) -> None:
    with pytest.raises(BadInput, match="bare state_dict") as caught:
        load_module(weights)
    assert "--arch" in str(caught.value.hint)
    with pytest.raises(BadInput, match="what the model's inputs are") as caught:
        load_module(weights, arch=f"{arch}:Two")
    assert "--input" in str(caught.value.hint)
    loaded = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT])
    assert loaded.outputs == (TensorSpec("output", "float32", ("N", 2)),)


def test_outputs_are_found_by_running_the_module(tmp_path: Path, arch: Path) -> None:
    """Two outputs, one without a second axis; int64 ids beside floats."""
    torch.save({"unused": torch.zeros(1)}, tmp_path / "w.pt")
    arch.write_text(
        ARCH + "\nclass Kept(Pair):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('unused', torch.zeros(1))\n",
        encoding="utf-8",
    )
    inputs = [INPUT, parse_spec("ids:int64[N,4]")]
    loaded = load_module(tmp_path / "w.pt", arch=f"{arch}:Kept", inputs=inputs)
    assert loaded.outputs == (
        TensorSpec("output_0", "float32", ("N",)),
        TensorSpec("output_1", "float32", ("N", 2)),
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Three", "size mismatch"),
        ("number", "a callable is needed"),
        ("not_a_module", "not a torch.nn.Module"),
        ("absent", "has no 'absent'"),
    ],
)
def test_an_architecture_that_does_not_fit(weights: Path, arch: Path, name: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        load_module(weights, arch=f"{arch}:{name}", inputs=[INPUT])


def test_missing_and_unexpected_keys_are_listed_ten_at_most(weights: Path, arch: Path) -> None:
    with pytest.raises(BadInput, match=r"missing 0\.weight.* and 30 more; unexpected") as caught:
        load_module(weights, arch=f"{arch}:Deep", inputs=[INPUT])
    assert "unexpected weight, bias" in str(caught.value)


def test_inputs_that_the_model_does_not_take(weights: Path, arch: Path) -> None:
    with pytest.raises(BadInput, match="does not take x:float32"):
        load_module(weights, arch=f"{arch}:Two", inputs=[parse_spec("x:float32[N,5]")])


def test_outputs_that_are_no_tensors(tmp_path: Path, arch: Path) -> None:
    path = tmp_path / "whole.pt"
    torch.save(torch.nn.Identity(), path)
    with pytest.raises(BadInput, match="would run Python code"):
        load_module(path, inputs=[INPUT])
    loaded = load_module(path, inputs=[INPUT], allow_pickle=True)
    assert loaded.ran_pickle
    assert loaded.outputs == (TensorSpec("output", "float32", ("N", 4)),)


@pytest.mark.parametrize("content", [{}, {"a": 1}, [torch.zeros(1)], torch.zeros(2)], ids=repr)
def test_files_that_hold_something_else(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(BadInput, match="state_dict"):
        load_module(tmp_path / "x.pt")


def test_a_checkpoint_of_another_version(tmp_path: Path) -> None:
    torch.save({"deploykit_checkpoint": 99, "state_dict": {}}, tmp_path / "x.pt")
    with pytest.raises(BadInput, match="version 99"):
        open_engine(tmp_path / "x.pt")


def test_a_gpu_that_is_not_there_is_refused(weights: Path, arch: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    loaded = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT])
    with pytest.raises(Unsupported, match="cuda"):
        TorchEngine(loaded, "w", "cuda", None)


def test_the_engine_takes_arrays_that_may_not_be_written_to(weights: Path, arch: Path) -> None:
    loaded = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT])
    rows = np.ones((3, 4), np.float32)
    rows.flags.writeable = False
    with TorchEngine(loaded, "w", "cpu", None) as engine:
        assert engine({"x": rows})["output"].shape == (3, 2)


def test_parameters_are_counted() -> None:
    module = torch.nn.Linear(4, 2)
    module.bias.requires_grad_(False)
    assert parameters(module) == {"parameters": 10, "trainable": 8, "weight_bytes": 40}
