"""Operators of libraries that are not here: named, and torchvision's provided where they can be."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.data.examples import Example  # noqa: E402
from deploykit.engines.torch.files import (  # noqa: E402
    absent,
    module_errors,
    with_torchvision,
)
from deploykit.engines.torch.open import load_module  # noqa: E402
from deploykit.engines.torch.outputs import (  # noqa: E402
    adapt,
    binding,
    describe,
)

pytestmark = pytest.mark.torch

SAID = {
    "operator torchvision::nms does not exist": "torchvision::nms",
    "Unknown builtin op: torchvision::nms.\nCould not find any": "torchvision::nms",
    "Could not run 'mine::op' with arguments from the 'CPU' backend": "mine::op",
    "Couldn't load custom C++ ops. This can happen if": "torchvision::nms",
    "mat1 and mat2 shapes cannot be multiplied": None,
}


class Asks:
    """A pickle of it raises what a library raises whose operators are not there."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise RuntimeError('operator mine::op does not exist')",)


@pytest.mark.parametrize("said", SAID)
def test_an_absent_operator_is_read_off_what_torch_says(said: str) -> None:
    assert absent(RuntimeError(said)) == SAID[said]
    outer = ValueError("cannot load")
    outer.__cause__ = RuntimeError(said)
    assert absent(outer) == SAID[said]


def test_a_pickle_that_lacks_an_operator_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(pickle.dumps(Asks()))
    with pytest.raises(
        BadInput, match=r"m\.pt: needs the operator mine::op of the library mine"
    ) as e:
        load_module(path, inputs=[parse_spec("x:float32[N,3]")], allow_pickle=True)
    assert "install mine" in str(e.value.hint)


def test_a_model_that_lacks_an_operator_s_kernel_names_it() -> None:
    library = torch.library.Library("deploykit_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values: torch.Tensor = torch.ops.deploykit_test.twice(x)
            return values

    module, specs = Twice(), [parse_spec("x:float32[N,3]")]
    adapter = adapt(module, binding(module, ["x"])[0], 1)
    with pytest.raises(BadInput, match="the operator deploykit_test::twice of the library"):
        describe("m", adapter, specs, Example())
    with pytest.raises(BadInput, match="the operator deploykit_test::twice"), module_errors("m"):
        module(torch.zeros(1, 3))


def test_what_lacks_torchvision_runs_again_and_all_else_does_not() -> None:
    runs: list[str] = []

    def first_fails(said: str) -> int:
        runs.append(said)
        if len(runs) == 1:
            raise RuntimeError(said)
        return len(runs)

    assert with_torchvision(lambda: first_fails("operator torchvision::nms does not exist")) == 2
    runs.clear()
    with pytest.raises(RuntimeError, match="mine"):
        with_torchvision(lambda: first_fails("operator mine::op does not exist"))


def test_an_output_whose_size_follows_the_data_has_a_free_axis() -> None:
    class Picks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows = torch.cat([x, torch.ones(1, 4)])
            return x, rows[rows[:, 0] > 0.5]

    module = Picks()
    adapter = adapt(module, binding(module, ["x"])[0], 1)
    outputs = describe("m", adapter, [parse_spec("x:float32[30,4]")], Example()).outputs
    assert [str(each) for each in outputs] == [
        "output_0:float32[30,4]",
        "output_1:float32[output_1_0,4]",
    ]
