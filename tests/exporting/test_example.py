"""An export uses the user's example, keeps axes, and looks beyond the usual inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.data.examples import Example  # noqa: E402

pytestmark = pytest.mark.torch
nn, functional = torch.nn, torch.nn.functional


class Applied(nn.Module):  # type: ignore[misc, name-defined]
    """A function of the inputs, behind a layer if they are floats."""

    def __init__(self, function: Any, *, width: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.table = nn.Parameter(torch.randn(32, 4))
        self.layer = nn.Linear(width, width) if width else nn.Identity()

    def forward(self, x: Any, other: Any = None) -> Any:
        x = self.layer(x)
        return self.function(self, x) if other is None else self.function(self, x, other)


def strided(me: Any, x: Any) -> Any:
    """As the front of a raw-audio model: one frame from 1,000 samples on."""
    kernel = torch.ones(1, 1, 10)
    for _ in range(3):
        x = functional.conv1d(x.reshape(x.shape[0], 1, -1), kernel, stride=9)
    return x


def widths(me: Any, x: Any) -> Any:
    """As LayoutLM looks up the width of a box, which is negative for random numbers."""
    return functional.embedding(x[..., 2] - x[..., 0], me.table)


def positions(me: Any, x: Any) -> Any:
    return x.unsqueeze(-1) * functional.embedding(torch.arange(x.shape[1]), me.table)


def scattered(me: Any, x: Any, index: Any) -> Any:
    return torch.zeros(x.shape[0], 3).scatter_reduce(1, index, x, "amax")


def by_len(me: Any, x: Any) -> Any:
    return x.reshape(len(x) * 2, -1).sum(-1).reshape(int(x.shape[0]), 2)


def by_constants(me: Any, x: Any) -> Any:
    numeric = torch.tensor([False, True])
    table = me.table[:4]
    columns = [
        x[:, at : at + 1] if number else functional.embedding(x[:, at].long(), table)
        for at, number in enumerate(numeric)
    ]
    return torch.cat(columns, 1)


def summed(_: Any, x: Any, edges: Any) -> Any:
    return torch.zeros_like(x).index_add(0, edges[1], x.index_select(0, edges[0]))


BOXES = torch.tensor([[[0, 1, 5, 9]] * 6, [[2, 2, 4, 30]] * 6])
INDEX = torch.tensor([[0, 1, 2, 0, 1]] * 2)
EDGES = torch.tensor([[5, 0, 1, 3, 4], [0, 5, 2, 1, 5]])
T_AXIS = {"x": {1: "T"}}
PLACES = torch.randn(2, 32)
EXPORTED: dict[str, tuple[Any, int, Any, dict[str, Any]]] = {
    "sizes of the example": (strided, 0, {"x": torch.randn(2, 4000)}, T_AXIS),
    "integers of the example": (widths, 0, {"x": BOXES}, T_AXIS),
    "indices of the example": (scattered, 5, (torch.randn(2, 5), INDEX), {}),
    "edges that point at rows": (summed, 0, (torch.randn(6, 8), EDGES), {"other": {1: "E"}}),
    "a table of positions": (positions, 0, {"x": PLACES[:, :16]}, T_AXIS),
    "at the end of the table": (positions, 0, {"x": PLACES}, T_AXIS),
    "a largest size by the user": (positions, 0, {"x": PLACES}, {"x": {1: "T<=32"}}),
    "len and int of a size": (by_len, 6, {"x": torch.randn(3, 6)}, {}),
    "a branch on constants": (by_constants, 0, {"x": torch.rand(2, 2)}, {}),
}


@pytest.mark.parametrize("case", EXPORTED)
def test_the_users_example_is_what_the_model_runs_on(tmp_path: Path, case: str) -> None:
    function, width, example, axes = EXPORTED[case]
    module = Applied(function, width=width).eval()
    made = dk.export(module, example, out=tmp_path / "m.onnx", dynamic_axes=axes)
    assert made.manifest.evidence.parity.passed
    arrays = list(example.values() if isinstance(example, dict) else example)
    rows = [
        each if "edges" in case else each[:1].repeat(5, *[1] * (each.ndim - 1)) for each in arrays
    ]
    with torch.inference_mode():
        wanted = module(*rows).numpy()
    with dk.load(made.path, "cpu") as engine:
        feeds = {spec.name: each.numpy() for spec, each in zip(engine.inputs, rows, strict=True)}
        (got,) = engine(feeds).values()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("spec", "note"), [("T", "up to 32"), ("T<=20", None)])
def test_specs_find_or_state_the_largest_size(tmp_path: Path, spec: str, note: str | None) -> None:
    module, specs = Applied(positions), [f"x:float32[N,{spec}]"]
    made = dk.export(module, inputs=specs, out=tmp_path / "m.onnx")
    assert made.manifest.evidence.parity.passed
    assert any(f"the model takes axis T {note}" in each for each in made.notes) is bool(note)
    for wrong in ("T<=1", "T<=many", "T<="):
        with pytest.raises(dk.BadInput, match="the largest size of axis T is a number of 2 or mo"):
            dk.export(module, inputs=[f"x:float32[N,{wrong}]"], out=tmp_path / "m.onnx")


def test_values_of_an_example_at_other_sizes_stay_what_they_are() -> None:
    specs = [parse_spec(text) for text in ("ids:int64[N,T]", "mask:int64[N,T]", "lengths:int32[N]")]
    given = {
        "ids": np.array([[5, 6, 7, 8], [9, 9, 9, 9]]),
        "mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "lengths": np.array([3, 4], np.int32),
    }
    for sizes in ({"N": 5, "T": 8}, {"N": 2, "T": 2}, {"N": 1, "T": 1}):
        feeds = Example(given).feeds(specs, sizes)
        assert feeds["ids"].shape == (sizes["N"], sizes["T"])
        assert set(feeds["ids"].flat) <= {5, 6, 7, 8, 9}
        assert (np.diff(feeds["mask"], axis=1) <= 0).all()  # padding stays at the end
        assert feeds["mask"].any(1).all()
        assert (feeds["lengths"] <= sizes["T"]).all()


def attended(me: Any, x: Any, keep: Any) -> Any:
    keep = keep[:, None, None].expand(-1, 1, x.shape[1], -1)
    return functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], keep)


OUTSIDE: dict[str, tuple[Any, Any, list[str]]] = {
    "logsigmoid": (lambda _, x: functional.logsigmoid(x), torch.randn(2, 8), []),
    "log of a sigmoid": (
        lambda _, x: torch.log(torch.sigmoid(x)),
        torch.randn(2, 8),
        ["up to 100"],
    ),
    "a hidden row": (
        attended,
        (torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool)),
        ["'other' false everywhere", "a row that 'other' hides as a whole"],
    ),
    "zeros": (lambda _, x: functional.gelu(1 / x), torch.rand(2, 8) + 1, ["with zeros the graph"]),
    "a softmax": (lambda _, x: x.softmax(-1) * x, torch.randn(2, 8), []),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_where_a_graph_leaves_pytorch_is_noted(tmp_path: Path, case: str) -> None:
    function, example, found = OUTSIDE[case]
    module = Applied(function).eval()
    made = dk.export(module, example, out=tmp_path / "m.onnx")
    notes = [note for note in made.notes if "does not answer as PyTorch" in note]
    assert len(notes) == len(found)
    assert all(words in note for words, note in zip(found, notes, strict=True))
    if "sigmoid" in case:
        x = np.array([[-100, -30, -18, -16, 0, 1, 20, 90]], np.float32)
        with dk.load(made.path, "cpu") as engine:
            (got,) = engine({engine.inputs[0].name: x}).values()
        np.testing.assert_allclose(got, functional.logsigmoid(torch.tensor(x)), atol=1e-6)


def test_no_size_is_blamed_where_the_graph_differs_at_those_of_the_export(tmp_path: Path) -> None:
    def distances(_: Any, x: Any) -> Any:  # PyTorch loses digits from 26 rows on
        parts = [each + 100 for each in torch.unbind(x, 1)]
        return torch.cdist(torch.stack(parts, 1), torch.stack(parts, 1))

    example = torch.randn(2, 30, 8)
    with pytest.raises(dk.GateFailed, match="is above") as caught:
        dk.export(Applied(distances), example, out=tmp_path / "m.onnx", max_error=1e-4)
    assert "a size decides" not in caught.value.message


def test_a_hidden_row_in_the_samples_is_named_and_no_random_number(tmp_path: Path) -> None:
    keep = np.ones((16, 6), bool)
    keep[::2] = False
    x = np.random.default_rng(0).normal(size=(16, 6, 8)).astype(np.float32)
    np.savez(tmp_path / "s.npz", x=x, other=keep)
    example = (torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(dk.GateFailed, match="only where a mask hides a whole row") as caught:
        dk.export(Applied(attended), example, out=tmp_path / "m.onnx", samples=tmp_path / "s.npz")
    assert "random numbers" not in caught.value.message


def test_hooks_see_the_arguments_that_go_by_position(tmp_path: Path) -> None:
    module = Applied(lambda _, x: x * 2, width=4)
    module.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    made = dk.export(module, torch.randn(2, 4), out=tmp_path / "m.onnx")
    assert made.parity is not None
    assert made.parity.passed
