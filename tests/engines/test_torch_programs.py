"""Files that hold a whole program: torch.export's `.pt2` and TorchScript."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.export import Dim  # noqa: E402

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.torch.engine import TorchEngine  # noqa: E402
from deploykit.engines.torch.loaded import Loaded  # noqa: E402
from deploykit.engines.torch.open import load_module  # noqa: E402

pytestmark = pytest.mark.torch


class Busy(torch.nn.Module):
    """A nested input, a constant one, a keyword; a dict with a tuple and a None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Any, d: dict[str, Any], k: int = 2, *, mask: Any) -> dict[str, Any]:
        twice = torch.cat([d["ids"], d["ids"]], 1)
        return {"a": self.linear(x) * k, "b": (x.sum(), twice, None), "x": mask.flatten(0, 1)}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    batch, length = Dim("batch", max=64), Dim("length", min=4)
    ids, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.bool)
    program = torch.export.export(
        Busy(),
        (torch.zeros(3, 4), {"ids": ids}, 3),
        {"mask": mask},
        dynamic_shapes={
            "x": {0: batch},
            "d": {"ids": {0: batch, 1: length}},
            "k": None,
            "mask": {0: batch, 1: length},
        },
    )
    path = tmp_path_factory.mktemp("programs") / "busy.pt2"
    torch.export.save(program, path)
    return path


def opened(path: Path, *inputs: str) -> Loaded:
    return load_module(path, inputs=[parse_spec(text) for text in inputs], allow_pickle=True)


def strings(specs: Sequence[object]) -> str:
    return " ".join(map(str, specs))


def test_a_program_says_its_inputs_outputs_and_ranges_itself(busy: Path) -> None:
    found = opened(busy)
    assert strings(found.inputs) == "x:float32[N,4] d_ids:int64[N,d_ids_1] mask:bool[N,d_ids_1]"
    assert strings(found.outputs) == (
        "a:float32[N,4] b_0:float32[] b_1:int64[N,b_1_1] x_2:bool[x_2_0]"
    )
    assert found.limits == {"N": (1, 64), "d_ids_1": (4, None)}
    assert (found.source, found.ran_pickle, found.notes) == ("torch.export", True, ())


def test_a_program_runs_with_its_constants_and_nested_inputs_in_place(busy: Path) -> None:
    rows, ids = np.ones((5, 4), np.float32), np.arange(30).reshape(5, 6)
    with TorchEngine(opened(busy), "busy", "cpu", None) as engine:
        answers = engine({"x": rows, "d_ids": ids, "mask": ids > 3})
        short = {"x": rows, "d_ids": ids[:, :3], "mask": ids[:, :3] > 3}
        with pytest.raises(BadInput, match=r"the model failed: .*size\(\)\[1\] >= 4"):
            engine(short)
    assert np.array_equal(answers["b_1"], np.concatenate([ids, ids], 1))
    assert np.array_equal(answers["x_2"], (ids > 3).ravel())
    assert answers["b_0"] == 20


def test_the_user_may_rename_and_fix_a_programs_axes(busy: Path) -> None:
    found = opened(busy, "rows:float32[B,4]", "ids:int64[B,7]", "x:bool[B,7]")
    assert strings(found.inputs) == "rows:float32[B,4] ids:int64[B,7] x:bool[B,7]"
    assert strings(found.outputs) == (
        "a:float32[B,4] b_0:float32[] b_1:int64[B,14] x_2:bool[x_2_0]"
    )
    assert found.limits == {"B": (1, 64)}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("x:float32[N,4]", "does not take x:float32"),
        ("x:float64[N,4] i:int64[N,T] m:bool[N,T]", "does not take x:float64"),
        ("x:float32[N,D] i:int64[N,T] m:bool[N,T]", r"axis 1 of input x:float32\[N,D\]"),
        ("x:float32[N,4] i:int64[B,T] m:bool[N,T]", r"axis 0 of input i:int64\[B,T\]"),
        ("x:float32[99,4] i:int64[99,T] m:bool[99,T]", "size 99, .* takes 1 to 64"),
        ("x:float32[N,4] i:int64[N,3] m:bool[N,3]", "size 3, .* takes 4 to any"),
    ],
    ids=["number", "dtype", "static", "apart", "above", "below"],
)
def test_inputs_that_a_program_does_not_have_are_named(
    busy: Path, inputs: str, message: str
) -> None:
    with pytest.raises(BadInput, match=rf"busy\.pt2: .*{message}"):
        opened(busy, *inputs.split())


def test_an_axis_of_even_sizes_only_is_noted(tmp_path: Path) -> None:
    half = Dim("half", max=50)
    program = torch.export.export(
        torch.nn.Identity(), (torch.zeros(4, 8),), dynamic_shapes=({1: 2 * half},)
    )
    torch.export.save(program, tmp_path / "m.pt2")
    found = opened(tmp_path / "m.pt2")
    assert strings(found.outputs) == "output:float32[4,input_1]"
    assert found.notes == ("axis input_1 takes only sizes of the form 2*k",)


# --- TorchScript ---


class Looping(torch.nn.Module):
    """Control flow that depends on a size: scripting keeps it, tracing would bake it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for step in range(ids.size(1)):
            x = x + step
        return self.linear(x), {"b": ids * 2}


def test_torchscript_binds_by_name_and_keeps_its_control_flow(tmp_path: Path) -> None:
    path, module = tmp_path / "looping.pt", Looping()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(module), path)
    with pytest.raises(BadInput, match="does not say what its inputs are"):
        opened(path)
    found = opened(path, "ids:int64[N,T]", "x:float32[N,4]")
    assert strings(found.outputs) == "output_0:float32[N,4] output_1_b:int64[N,T]"
    assert (found.source, found.ran_pickle) == ("TorchScript", True)
    for length in (1, 6):
        x, ids = torch.ones(2, 4), torch.ones(2, length, dtype=torch.int64)
        torch.testing.assert_close(found.module(ids, x)[0], module(x, ids)[0])
