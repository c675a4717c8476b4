"""The time of each module of a model: its own, without that of the modules inside it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.benchmarking import layers as bench_layers  # noqa: E402
from deploykit.benchmarking.columns import open_entry  # noqa: E402
from deploykit.benchmarking.timing import Setup, Timing, sweep  # noqa: E402
from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.recipe import load_recipe  # noqa: E402
from deploykit.core.tensors import TensorSpec  # noqa: E402
from deploykit.engines.engine import Arrays  # noqa: E402
from deploykit.engines.torch import engine as layers  # noqa: E402
from deploykit.engines.torch.engine import TorchEngine  # noqa: E402
from deploykit.engines.torch.loaded import describe_module  # noqa: E402
from deploykit.engines.torch.open import save_checkpoint  # noqa: E402

pytestmark = pytest.mark.torch
X = {"x": np.ones((2, 4), np.float32)}


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Takes(torch.nn.Module):  # type: ignore[misc]  # torch is Any here
    """Moves the clock by `ms` before what is inside it and by as much after."""

    def __init__(self, clock: Clock, ms: int, *inside: Any) -> None:
        super().__init__()
        self.clock, self.ms, self.inside = clock, ms, torch.nn.ModuleList(inside)
        self.fails = False

    def forward(self, x: Any) -> Any:
        self.clock.ns += self.ms * 1_000_000
        for each in self.inside:
            x = each(x)
        if self.fails:
            raise RuntimeError("broken")
        self.clock.ns += self.ms * 1_000_000
        return x + 1


def engine_of(module: Any, *shape: str | int) -> TorchEngine:
    spec = TensorSpec("x", "float32", ("N", *shape))
    return TorchEngine(describe_module("m", module, [spec], "module"), "m", "cpu", None)


def test_a_module_has_its_own_time_and_all_add_up_to_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(layers, "perf_counter_ns", clock)
    twice = Takes(clock, 3)
    with engine_of(Takes(clock, 10, Takes(clock, 1, twice), twice), 4) as engine:
        wanted = engine(X)
        watch = layers.LayerWatch(engine)
        np.testing.assert_equal(watch(X), wanted)
        twice.fails = True
        with pytest.raises(BadInput, match="broken"):
            watch(X)
        twice.fails = False
        np.testing.assert_equal(watch(X), wanted)
    times = {key[:2]: ms for key, ms in watch.runs[-1].items()}
    assert times == {
        ("inputs and outputs", "Engine"): 0,
        ("(model)", "Takes"): 20,
        ("inside.0", "Takes"): 2,
        ("inside.0.inside.0", "Takes"): 12,  # in two places
    }
    assert watch.runs[0] == watch.runs[-1]


def test_an_encoder_keeps_its_fast_path() -> None:
    """Which calls none of its modules: hooks would switch it off, and time another computation."""
    encoder = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with engine_of(encoder, 3, 4) as engine:
        watch = layers.LayerWatch(engine)
        watch({"x": np.ones((2, 3, 4), np.float32)})
    assert {key[0] for key in watch.runs[0]} == {"inputs and outputs", "(model)"}


def run_here(_: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """As in a process of its own, to which all is sent."""
    function, arguments = pickle.loads(pickle.dumps((function, arguments)))
    return function(*arguments, None)


def feeds_of(shape: tuple[int, ...], batch: int) -> Arrays:
    return {"image": np.ones((batch, *shape), np.float32)}


def test_bench_times_the_modules_of_a_checkpoint_however_many_sessions_it_ran_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_layers, "run_apart", run_here)
    monkeypatch.setattr("deploykit.benchmarking.layers._LENGTH_S", 0.01)
    recipe, path = load_recipe("mnist-cnn"), tmp_path / "m.pt"
    save_checkpoint(path, recipe.build(), "mnist-cnn", recipe.inputs, recipe.outputs)
    entry = open_entry(path)
    setup = Setup("m", partial(entry.open, "cpu"), sessions=2)
    feeds = partial(feeds_of, (1, 28, 28))
    points = sweep([setup], [1], Timing(0.0, 0.02, 2), feeds)
    (found,), gaps = bench_layers.measure_layers([entry], [setup], points, feeds)
    names = {each.name for each in found.layers}
    assert {"conv1", "dense1", "(model)", "inputs and outputs"} <= names
    assert (gaps, found.runtime) == ([], f"torch {torch.__version__}")
    assert found.sum_ms > 0
