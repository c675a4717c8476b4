"""Checkpoints, weights and modules as engines: what fits, how they run, and how long."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput, NotFound, OutOfMemory, Unsupported  # noqa: E402
from deploykit.core.files import folder  # noqa: E402
from deploykit.core.recipe import load_recipe  # noqa: E402
from deploykit.core.tensors import TensorSpec, parse_spec  # noqa: E402
from deploykit.engines.torch import engine as layers  # noqa: E402
from deploykit.engines.torch.engine import TorchEngine, open_engine  # noqa: E402
from deploykit.engines.torch.files import Content, module_errors  # noqa: E402
from deploykit.engines.torch.loaded import Loaded, describe_module, load_live  # noqa: E402
from deploykit.engines.torch.open import (  # noqa: E402
    build_module,
    copy_weights,
    load_module,
    load_weights,
    look,
    save_checkpoint,
)

pytestmark = pytest.mark.torch

INPUT = parse_spec("x:float32[N,4]")
X = {"x": np.ones((2, 4), np.float32)}


ARCH = """
import torch
build = lambda: torch.nn.Linear(4, 2)
ready = torch.nn.Linear(4, 2)
number = 3
not_a_module = lambda: 3
def needy(width, depth, *extra, bias=True, **more):
    pass
def broken():
    raise ZeroDivisionError("no\\nmore")
"""


@pytest.fixture
def arch(tmp_path: Path) -> str:
    (tmp_path / "arch.py").write_text(ARCH, encoding="utf-8")
    return f"{tmp_path}/arch.py:build"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pth"
    torch.save(torch.nn.Linear(4, 2).state_dict(), path)
    return path


def test_a_checkpoint_comes_back_with_its_specs_and_weights(tmp_path: Path, arch: str) -> None:
    module, path = torch.nn.Linear(4, 2), tmp_path / "m.pt"
    output = parse_spec("y:float32[N,2]")
    save_checkpoint(path, module, "mine", SimpleNamespace(inputs=[INPUT], outputs=[output]))
    loaded = load_module(path, arch=arch, inputs=[INPUT])
    assert (loaded.inputs, loaded.outputs) == ((INPUT,), (output,))
    assert torch.equal(loaded.module.state_dict()["module.weight"], module.weight)
    assert (loaded.source, loaded.ran_pickle, loaded.notes) == ("checkpoint", False, ())
    assert set(load_weights(path)) == {"weight", "bias"}
    with pytest.raises(BadInput, match=r"its inputs are x:float32\[N,4\]"):
        load_module(path, arch=arch, inputs=[parse_spec("y:float32[N,4]")])


def test_a_checkpoint_of_somebody_elses_recipe_asks_for_the_architecture(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    for name in (f"{tmp_path}/evil.py", "os:system", "../../evil"):
        recipe: Any = SimpleNamespace(inputs=[INPUT], outputs=[INPUT])
        save_checkpoint(tmp_path / "m.pt", torch.nn.Linear(4, 2), name, recipe)
        with pytest.raises(BadInput, match="does not come with deploykit") as caught:
            load_module(tmp_path / "m.pt")
        assert "`arch`" in str(caught.value.hint)
        inputs, outputs, details = look(tmp_path / "m.pt")  # which needs no recipe
        assert (inputs, outputs, details["recipe"]) == ((INPUT,), (INPUT,), name)
    torch.save({"deploykit_checkpoint": 99, "state_dict": {}}, tmp_path / "x.pt")
    with pytest.raises(BadInput, match="version 99"):
        open_engine(tmp_path / "x.pt")


def test_the_file_of_a_users_recipe_opens_its_checkpoint_as_a_packaged_ones_name_does(
    tmp_path: Path,
) -> None:
    mine = str(copy(folder("models") / "cats_dogs.py", tmp_path / "mine.py"))
    recipe = load_recipe("cats-dogs")
    module, bytes_in = recipe.build(), torch.randint(0, 256, (2, 128, 128, 3), dtype=torch.uint8)
    answers = []
    for name, arch in (("cats-dogs", None), (mine, mine), (mine, f"{mine}:RECIPE")):
        save_checkpoint(tmp_path / "m.pt", module, name, recipe)
        loaded = load_module(tmp_path / "m.pt", arch=arch)
        assert (loaded.inputs, loaded.recipe) == (recipe.inputs, name)
        answers.append(loaded.module(bytes_in))
    assert all(torch.equal(answers[0][0], answer[0]) for answer in answers[1:])


def test_a_bare_state_dict_needs_arch_and_inputs(weights: Path, arch: str) -> None:
    with pytest.raises(BadInput, match="what the model is or what its inputs are") as caught:
        load_module(weights)
    assert "`arch`" in str(caught.value.hint)
    with pytest.raises(BadInput, match="what its inputs are") as caught:
        load_module(weights, arch=arch)
    assert "`inputs`" in str(caught.value.hint)
    loaded = load_module(weights, arch=arch, inputs=[INPUT])
    assert loaded.outputs == (TensorSpec("output", "float32", ("N", 2)),)
    with pytest.raises(BadInput, match="does not say what the model is") as caught:
        open_engine(weights)
    assert "export" in str(caught.value.hint)


@pytest.mark.parametrize("writeable", [True, False])
def test_a_module_that_writes_to_its_input_leaves_the_callers_array(writeable: bool) -> None:
    class Centres(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x -= 3
            return x * 2

    x = np.ones((2, 4), np.float32)
    x.flags.writeable = writeable
    with TorchEngine(load_live(Centres(), [INPUT]), "centres", "cpu", None) as engine:
        for run in (engine, engine.in_float64):
            assert (next(iter(run({"x": x}).values())) == -4).all()
        assert (x == 1).all()


def test_a_model_that_fails_is_bad_input() -> None:
    ids = parse_spec("ids:int64[N,T]")
    with (
        TorchEngine(load_live(torch.nn.Embedding(5, 2), [ids]), "m", "cpu", None) as engine,
        pytest.raises(BadInput, match="m: the model failed: IndexError"),
    ):
        engine({"ids": np.full((1, 3), 9)})
    loaded = load_live(torch.nn.LSTM(4, 2), [INPUT])
    two = Loaded(loaded.module, (INPUT,), loaded.outputs[:1], "checkpoint")
    with (
        TorchEngine(two, "m", "cpu", None) as engine,
        pytest.raises(BadInput, match="returned 3 tensors, 1 were announced"),
    ):
        engine(X)
    with pytest.raises(OutOfMemory, match="the GPU's memory is full"), module_errors("m"):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def test_bfloat16_outputs_come_as_float32() -> None:
    class Half(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.bfloat16()

    loaded = load_live(Half(), [INPUT])
    assert loaded.outputs == (TensorSpec("output", "bfloat16", ("N", 4)),)
    with TorchEngine(loaded, "w", "cpu", None) as engine:
        assert engine(X)["output"].dtype == np.float32


@pytest.mark.parametrize(
    ("asked", "named"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_a_gpu_is_named_by_its_number_and_refused_where_none_is(
    monkeypatch: pytest.MonkeyPatch, asked: str, named: str
) -> None:
    """A tensor on "cuda" says "cuda:0", which is another device than "cuda" to torch."""
    moved: list[str] = []
    loaded = Loaded(SimpleNamespace(to=moved.append), (INPUT,), (INPUT,), "module")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if asked != "auto":
        with pytest.raises(Unsupported, match="cuda"):
            TorchEngine(loaded, "m", asked, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (TorchEngine(loaded, "m", asked, None).device, moved) == (named, [named])


def test_look_counts_tensors_and_runs_no_code(weights: Path, tmp_path: Path) -> None:
    inputs, outputs, details = look(weights)
    assert (inputs, outputs) == ((), ())
    assert (details["kind"], details["tensors"], details["parameters"]) == ("state_dict", 2, 10)
    assert details["types"] == {"float32": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(4, 2)), tmp_path / "m.pt")
    assert "not opened" in look(tmp_path / "m.pt")[2]["contents"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_in_float64_leaves_the_weights_where_they_are(fails: bool) -> None:
    class Scaled(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            seen.extend(each.dtype for each in tensors)
            return (super().forward(x.float() if fails else x) / self.scale,)

    seen: list[torch.dtype] = []
    module = Scaled(4, 2)
    module.register_buffer("scale", torch.tensor(3.0))
    module.register_buffer("count", torch.tensor(3))
    tensors = [*module.parameters(), *module.buffers()]
    before = [(each.data_ptr(), each.dtype) for each in tensors]
    loaded = Loaded(module, (INPUT,), (parse_spec("y:float32[N,2]"),), "module")
    with TorchEngine(loaded, "m", "cpu", None) as engine:
        if fails:
            with pytest.raises(BadInput, match="in float64 the model failed"):
                engine.in_float64(X)
        else:
            assert engine.in_float64(X)["y"] == pytest.approx(engine(X)["y"], rel=1e-5)
    assert seen[:4] == [torch.float64] * 3 + [torch.int64]
    assert [(each.data_ptr(), each.dtype) for each in tensors] == before


class Takes(torch.nn.Module):  # type: ignore[misc]  # torch is Any here
    """Moves the clock by `ms` before what is inside it and by as much after."""

    def __init__(self, clock: Any, ms: int, *inside: Any) -> None:
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
    return TorchEngine(describe_module("m", Content("module", module), [spec]), "m", "cpu", None)


def test_a_module_has_its_own_time_and_all_add_up_to_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(ns=0)
    monkeypatch.setattr(layers, "perf_counter_ns", lambda: clock.ns)
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


FILE = Path("w.pt")


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("number", BadInput, "arch.py:number: TypeError: 3 is not a callable object$"),
        ("not_a_module", BadInput, "returned a int, not a torch.nn.Module"),
        ("absent", NotFound, "has no 'absent'"),
        ("needy", BadInput, "missing a required argument: .width.$"),
        ("broken", BadInput, "arch.py:broken: ZeroDivisionError: no$"),
    ],
)
def test_what_builds_no_module_is_named(
    arch: str, name: str, error: type[BadInput], told: str
) -> None:
    with pytest.raises(error, match=told) as caught:
        build_module(arch.replace(":build", f":{name}"))
    assert ("./file.py:build" in str(caught.value.hint)) is (name == "needy")
    ready, _ = build_module(arch.replace(":build", ":ready"))
    assert isinstance(ready, torch.nn.Linear)


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
            "0.weight has size [7, 3] in the file, [4, 4] in the model, "
            "0.bias has size [7, 3] in the file, [4] in the model and 10 more"
        ),
    ),
    "a prefix of some names": (
        lambda: torch.nn.Linear(4, 2),
        {"module.weight": torch.zeros(2, 4), "bias": torch.zeros(2)},
        "missing weight; unexpected module.weight",
    ),
    "integers": (  # torch would convert them silently
        lambda: torch.nn.Linear(4, 2),
        {"weight": torch.zeros(2, 4, dtype=torch.int8), "bias": torch.zeros(2)},
        "weight is int8 in the file, float32 in the model",
    ),
    "two models": (
        lambda: torch.nn.Linear(4, 2),
        {
            f"{name}.{key}": torch.zeros(2, *[4] * (key == "weight"))
            for name in ("student", "teacher")
            for key in ("weight", "bias")
        },
        "missing weight, bias; unexpected student.weight, student.bias and 2 more",
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
    assert notes == (f"took the weights under '{prefix}'",)
    averaged = torch.optim.swa_utils.AveragedModel(linears(1))
    notes = copy_weights(FILE, linears(1), averaged.state_dict())
    assert notes == ("took the weights under 'module.'; not used: n_averaged",)
    assert copy_weights(FILE, Own(), Own().state_dict()) == ()  # which has it itself
    norm, older = torch.nn.BatchNorm1d(3), {"weight": torch.full((3,), 7.0)}
    older = {**norm.state_dict(), **older}
    del older["num_batches_tracked"]  # as in files of years ago
    copy_weights(FILE, norm, {f"{prefix}{name}": value for name, value in older.items()})
    assert norm.weight.tolist() == [7.0] * 3


def test_tied_weights_may_be_missing_from_the_file() -> None:
    """As transformers does in `.safetensors` for tied embeddings."""
    module = Tied()
    notes = copy_weights(FILE, module, {"table.weight": torch.ones(5, 3)})
    assert bool((module.head.weight == 1).all())
    assert notes == ("not in the file, as they share another's weights: head.weight",)
    notes = copy_weights(FILE, module, {"_orig_mod.head.weight": torch.zeros(5, 3)})
    assert bool((module.table.weight == 0).all())
    assert notes[0] == "took the weights under '_orig_mod.'"


def test_the_average_next_to_a_model_is_left_out() -> None:
    """As a LightningModule keeps both."""
    module, source = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(4, 2))
    both = torch.nn.ModuleDict({"ema": average, "net": source})
    assert copy_weights(FILE, module, both.state_dict())[0].startswith("took the weights under 'ne")
    assert torch.equal(module.weight, source.weight)


def test_a_module_may_make_room_for_the_files_sizes() -> None:
    """As anomalib's memory banks do, which begin empty."""

    class Bank(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.empty(0))

        def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
            self.rows = state[f"{prefix}rows"].clone()
            super()._load_from_state_dict(state, prefix, *more)

    module = Bank()
    assert copy_weights(FILE, module, {"rows": torch.ones(3, 2)}) == ()
    assert module.rows.shape == (3, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_float16_weights_are_converted_to_the_models_type_with_a_note(dtype: str) -> None:
    module, source = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).to(getattr(torch, dtype))
    notes = copy_weights(FILE, module, source.state_dict())
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight, source.weight.float())
    assert notes == (f"2 tensors converted from {dtype} to float32",)


def test_a_lazy_module_gets_copies_of_the_files_shapes(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(torch.nn.Linear(300, 300).state_dict(), path)
    mapped = torch.load(path, mmap=True, weights_only=True)
    module = torch.nn.LazyLinear(300)
    copy_weights(path, module, mapped)
    assert torch.equal(module.weight, mapped["weight"])
    assert module.weight.data_ptr() != mapped["weight"].data_ptr()
