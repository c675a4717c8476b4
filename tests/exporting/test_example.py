"""An export uses the user's example, keeps axes, and looks beyond the usual inputs."""

from __future__ import annotations

import math
import re
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
from deploykit.exporting.onnx import export_module  # noqa: E402

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


def by_constants_next_to_checks(me: Any, x: Any) -> Any:
    ready = torch.tensor(True)
    place = functional.one_hot(x.argmax(-1), x.shape[-1])  # torch itself looks for wrong ids
    return x + place if ready else x


BOXES = torch.tensor([[[0, 1, 5, 9]] * 6, [[2, 2, 4, 30]] * 6])
WAVE, INDEX = torch.randn(2, 4000), torch.tensor([[0, 1, 2, 0, 1]] * 2)
EXPORTED: dict[str, tuple[Any, int, Any, dict[str, Any]]] = {
    "sizes of the example": (strided, 0, {"x": WAVE}, {"x": {1: "T"}}),
    "integers of the example": (widths, 0, {"x": BOXES}, {"x": {1: "T"}}),
    "indices of the example": (scattered, 5, (torch.randn(2, 5), INDEX), {}),
    "a table of positions": (positions, 0, {"x": torch.randn(2, 16)}, {"x": {1: "T"}}),
    "at the end of the table": (positions, 0, {"x": torch.randn(2, 32)}, {"x": {1: "T"}}),
    "a largest size by the user": (positions, 0, {"x": torch.randn(2, 32)}, {"x": {1: "T<=32"}}),
    "len and int of a size": (by_len, 6, {"x": torch.randn(3, 6)}, {}),
    "a branch on constants": (by_constants, 0, {"x": torch.rand(2, 2)}, {}),
    "next to torch's checks": (by_constants_next_to_checks, 0, {"x": torch.rand(2, 4)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPORTED)
def test_the_users_example_is_what_the_model_runs_on(tmp_path: Path, case: str) -> None:
    function, width, example, axes = EXPORTED[case]
    module = Applied(function, width=width).eval()
    made = dk.export(module, example, out=tmp_path / "m.onnx", dynamic_axes=axes)
    assert made.parity is not None
    assert made.parity.passed
    arrays = list(example.values() if isinstance(example, dict) else example)
    rows = [each[:1].repeat(5, *[1] * (each.ndim - 1)) for each in arrays]
    with torch.inference_mode():
        wanted = module(*rows).numpy()
    with dk.load(made.path, "cpu") as engine:
        feeds = {spec.name: each.numpy() for spec, each in zip(engine.inputs, rows, strict=True)}
        (got,) = engine(feeds).values()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("spec", "note"), [("T", "up to 32"), ("T<=20", None)])
def test_specs_find_or_state_the_largest_size(tmp_path: Path, spec: str, note: str | None) -> None:
    made = dk.export(Applied(positions), inputs=[f"x:float32[N,{spec}]"], out=tmp_path / "m.onnx")
    assert any(f"the model takes axis T {note}" in each for each in made.notes) is bool(note)


class Placed(nn.Module):  # type: ignore[misc, name-defined]
    """Takes 7 to 12 steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.conv = nn.Parameter(torch.randn(12)), nn.Conv1d(1, 1, 7)

    def forward(self, x: Any) -> Any:
        return (self.conv((x * self.table[: x.shape[1]])[:, None])[:, 0],)


def test_no_size_above_the_users_largest_is_tried(tmp_path: Path) -> None:
    made = dk.export(Placed(), inputs=["x:float32[N,T<=10]"], out=tmp_path / "m.onnx")
    assert made.parity is not None
    assert made.parity.passed
    specs = [parse_spec("x:float32[N,T]")], [parse_spec("y:float32[N,U]")]
    done = export_module(Placed(), *specs, tmp_path / "o.onnx", example=Example(most={"T": 10}))
    assert done.job.sizes["T"] == 10


@pytest.mark.parametrize("spec", ["T<=1", "T<=many", "T<="])
def test_a_largest_size_is_a_number_of_2_or_more(tmp_path: Path, spec: str) -> None:
    with pytest.raises(dk.BadInput, match="the largest size of axis T is a number of 2 or more"):
        dk.export(Applied(positions), inputs=[f"x:float32[N,{spec}]"], out=tmp_path / "m.onnx")


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


def test_a_graph_network_whose_edges_point_at_rows_is_exported(tmp_path: Path) -> None:
    def summed(_: Any, x: Any, edges: Any) -> Any:
        return torch.zeros_like(x).index_add(0, edges[1], x.index_select(0, edges[0]))

    edges = torch.tensor([[5, 0, 1, 3, 4], [0, 5, 2, 1, 5]])
    axes = {"other": {1: "E"}}
    example = (torch.randn(6, 8), edges)
    made = dk.export(Applied(summed), example, out=tmp_path / "m.onnx", dynamic_axes=axes)
    assert made.parity is not None
    assert made.parity.passed


def test_hooks_see_the_arguments_that_go_by_position(tmp_path: Path) -> None:
    module = Applied(lambda _, x: x * 2, width=4)
    module.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    made = dk.export(module, torch.randn(2, 4), out=tmp_path / "m.onnx")
    assert made.parity is not None
    assert made.parity.passed


def falling(me: Any, x: Any) -> Any:
    return x[..., None] * functional.embedding(torch.arange(x.shape[1] - 1, -1, -1), me.table)


def reduced(_: Any, x: Any, index: Any) -> Any:
    return torch.zeros(x.shape[0], 3).scatter_reduce(1, index, x, "mean")


class Cast(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)


class Recurrent(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 8, 2, batch_first=True)

    def forward(self, x: Any, h: Any) -> Any:
        return self.gru(x, h)[0]


T_AXIS: dict[str, Any] = {"dynamic_axes": {"x": {1: "T"}}}
CURES: dict[str, tuple[Any, Any, dict[str, Any], str, str]] = {
    "autocast": (Cast(), torch.randn(2, 4), {}, "computes in bfloat16", "without torch.autocast"),
    "float64": (
        nn.Conv1d(2, 2, 3).double(),
        torch.randn(2, 2, 9, dtype=torch.float64),
        {},
        "computes in float64",
        "model.float()",
    ),
    "a mean by index": (
        Applied(reduced),
        (torch.randn(2, 5), INDEX),
        {},
        r"writes scatter_reduce\(reduce='mean'\) unlike PyTorch \(test_example.py",
        "divide by the counts",
    ),
    "a divisor": (
        Applied(lambda _, x: functional.avg_pool2d(x, 2, divisor_override=3)),
        torch.randn(2, 3, 8, 8),
        {},
        r"writes avg_pool\(divisor_override\) unlike PyTorch",
        "window's area",
    ),
    "an arange that falls": (
        Applied(falling),
        torch.randn(2, 6),
        T_AXIS,
        "an arange that falls",
        "flip",
    ),
    "linspace": (
        Applied(lambda _, x: x + torch.linspace(0, 1, x.shape[1])),
        torch.randn(2, 6),
        T_AXIS,
        "fixes axis T",
        r"torch.arange\(n\) \* step",
    ),
    "take_along_dim": (
        Applied(lambda _, x: x.take_along_dim(x.argsort(1), 1)),
        torch.randn(3, 6),
        {},
        "fixes axis N",
        "torch.gather",
    ),
    "a root of a size": (
        Applied(lambda _, x: x / math.sqrt(x.shape[1])),
        torch.randn(2, 6),
        T_AXIS,
        "fixes axis T",
        r"\*\* 0.5",
    ),
    "a batch on another axis": (
        Recurrent(),
        (torch.randn(3, 6, 5), torch.randn(2, 3, 8)),
        {},
        "axis N is not dynamic",
        r"axis 0 of 'h' is not the batch: `inputs`, 'h:float32\[2,N,8\]'",
    ),
}


@pytest.mark.parametrize("case", CURES)
def test_each_refusal_names_its_cause_and_a_cure(tmp_path: Path, case: str) -> None:
    module, example, more, cause, cure = CURES[case]
    with pytest.raises(dk.DeploykitError) as caught:
        dk.export(module.eval(), example, out=tmp_path / "m.onnx", **more)
    assert re.search(cause, caught.value.message)
    assert re.search(cure, str(caught.value.hint))
    assert not type(caught.value).__name__.startswith("_")


def test_a_failing_export_repeats_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[str] = []
    trace = torch.export.export

    def counted(module: Any, args: Any, *rest: Any, **given: Any) -> Any:
        shapes = [each.shape for each in args]
        traces.append(f"{shapes} {given.get('dynamic_shapes')} {given.get('strict')}")
        return trace(module, args, *rest, **given)

    monkeypatch.setattr(torch.export, "export", counted)
    module, example, more, *_ = CURES["linspace"]
    with pytest.raises(dk.BadInput):
        dk.export(module.eval(), example, out=tmp_path / "m.onnx", **more)
    assert len(traces) > 2
    assert len(traces) == len(set(traces))
