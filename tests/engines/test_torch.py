"""Opening PyTorch files: what is read, what is refused, and that nothing in them runs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from shutil import copy as copy_file
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput, OutOfMemory, Unsupported  # noqa: E402
from deploykit.core.files import folder  # noqa: E402
from deploykit.core.recipe import load_recipe  # noqa: E402
from deploykit.core.tensors import TensorSpec, parse_spec  # noqa: E402
from deploykit.engines.torch.engine import TorchEngine, open_engine  # noqa: E402
from deploykit.engines.torch.files import module_errors  # noqa: E402
from deploykit.engines.torch.loaded import (  # noqa: E402
    Loaded,
    load_live,
)
from deploykit.engines.torch.open import load_module, load_weights, save_checkpoint  # noqa: E402

pytestmark = pytest.mark.torch

INPUT = parse_spec("x:float32[N,4]")
ARCH = """
import torch
Two = lambda: torch.nn.Linear(4, 2)
class Pair(torch.nn.Module):
    def forward(self, x, ids):
        return x.sum(1), x[:, :2] + ids[:, :2]
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
    assert torch.equal(loaded.module.state_dict()["module.weight"], module.weight)
    assert not loaded.module.module.training
    assert (loaded.source, loaded.ran_pickle, loaded.notes) == ("checkpoint", False, ())
    assert set(load_weights(tmp_path / "m.pt")) == {"weight", "bias"}


def test_a_checkpoint_of_somebody_elses_recipe_asks_for_the_architecture(tmp_path: Path) -> None:
    """Its text is never taken as a path or module to import."""
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
    for name in (f"{tmp_path}/evil.py", "os:system", "../../evil"):
        save_checkpoint(tmp_path / "m.pt", torch.nn.Linear(4, 2), name, [INPUT], [INPUT])
        with pytest.raises(BadInput, match="does not come with deploykit") as caught:
            load_module(tmp_path / "m.pt")
        assert "`arch`" in str(caught.value.hint)


def test_the_file_of_a_users_recipe_opens_its_checkpoint_as_a_packaged_ones_name_does(
    tmp_path: Path,
) -> None:
    """With the preprocessing that the recipe declares: bytes in."""
    mine = copy_file(folder("models") / "cats_dogs.py", tmp_path / "mine.py")
    recipe = load_recipe("cats-dogs")
    module, bytes_in = recipe.build(), torch.randint(0, 256, (2, 128, 128, 3), dtype=torch.uint8)
    answers = []
    for name, arch in (("cats-dogs", None), (str(mine), str(mine))):
        save_checkpoint(tmp_path / "m.pt", module, name, recipe.inputs, recipe.outputs)
        loaded = load_module(tmp_path / "m.pt", arch=arch)
        assert (loaded.inputs, loaded.recipe) == (recipe.inputs, name)
        answers.append(loaded.module(bytes_in))
    assert torch.equal(answers[0][0], answers[1][0])


def test_a_bare_state_dict_needs_arch_and_inputs(weights: Path, arch: Path) -> None:
    with pytest.raises(BadInput, match="what the model is or what its inputs are") as caught:
        load_module(weights)
    assert "`arch`" in str(caught.value.hint)
    assert "`inputs`" in str(caught.value.hint)
    with pytest.raises(BadInput, match="what its inputs are") as caught:
        load_module(weights, arch=f"{arch}:Two")
    assert "`inputs`" in str(caught.value.hint)
    loaded = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT])
    assert loaded.outputs == (TensorSpec("output", "float32", ("N", 2)),)


def test_outputs_are_found_by_running_the_module(tmp_path: Path, arch: Path) -> None:
    """Two outputs, one without a second axis; int64 ids and floats."""
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


def test_inputs_that_the_model_does_not_take(weights: Path, arch: Path) -> None:
    with pytest.raises(BadInput, match="does not take x:float32"):
        load_module(weights, arch=f"{arch}:Two", inputs=[parse_spec("x:float32[N,5]")])


def test_a_module_returns_a_tuple_whatever_the_users_returns(weights: Path, arch: Path) -> None:
    loaded = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT])
    returned = loaded.module(torch.zeros(3, 4))
    assert isinstance(returned, tuple)
    assert [value.shape for value in returned] == [(3, 2)]


def test_a_module_stays_in_eval_mode(weights: Path, arch: Path) -> None:
    """Exporters and users call train(); dropout must not come back."""
    loaded = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT])
    loaded.module.train()
    assert not loaded.module.training
    assert not loaded.module.module.training


def test_a_copy_of_a_module_has_weights_of_its_own(weights: Path, arch: Path) -> None:
    module = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT]).module
    copied = copy.deepcopy(module)
    torch.nn.init.zeros_(copied.module.weight)
    torch.nn.init.zeros_(copied.module.bias)
    assert not copied(torch.ones(1, 4))[0].any()
    assert module(torch.ones(1, 4))[0].any()


def test_a_checkpoint_says_its_inputs_itself(tmp_path: Path, arch: Path) -> None:
    save_checkpoint(tmp_path / "m.pt", torch.nn.Linear(4, 2), "mine", [INPUT], [INPUT])
    load_module(tmp_path / "m.pt", arch=f"{arch}:Two", inputs=[INPUT])
    with pytest.raises(BadInput, match=r"its inputs are x:float32\[N,4\]"):
        load_module(tmp_path / "m.pt", arch=f"{arch}:Two", inputs=[parse_spec("y:float32[N,4]")])


def test_a_module_that_writes_to_its_input_leaves_the_callers_array() -> None:
    """It is what the exported graph is compared on next."""

    class Centres(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x -= 3
            return x * 2

    x = np.ones((2, 4), np.float32)
    with TorchEngine(load_live(Centres(), [INPUT]), "centres", "cpu", None) as engine:
        for run in (engine, engine.in_float64):
            assert (next(iter(run({"x": x}).values())) == -4).all()
        assert (x == 1).all()


def test_weights_alone_are_refused_as_an_engine(weights: Path) -> None:
    with pytest.raises(BadInput, match="does not say what the model is") as caught:
        open_engine(weights)
    assert "export" in str(caught.value.hint)


def test_a_checkpoint_of_another_version(tmp_path: Path) -> None:
    torch.save({"deploykit_checkpoint": 99, "state_dict": {}}, tmp_path / "x.pt")
    with pytest.raises(BadInput, match="version 99"):
        open_engine(tmp_path / "x.pt")


def test_an_input_that_the_model_fails_on_is_bad_input(tmp_path: Path) -> None:
    """An id beyond the table: the shapes fit, the values do not."""
    table = torch.nn.Embedding(5, 2)
    (tmp_path / "a.py").write_text("import torch\nbuild = lambda: torch.nn.Embedding(5, 2)")
    torch.save(table.state_dict(), tmp_path / "w.pt")
    ids = parse_spec("ids:int64[N,T]")
    loaded = load_module(tmp_path / "w.pt", arch=f"{tmp_path}/a.py:build", inputs=[ids])
    with (
        TorchEngine(loaded, "w.pt", "cpu", None) as engine,
        pytest.raises(BadInput, match=r"w\.pt: the model failed: IndexError"),
    ):
        engine({"ids": np.full((1, 3), 9)})


def test_an_output_more_than_the_checkpoint_announces_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\nbuild = lambda: torch.nn.LSTM(4, 2)")
    save_checkpoint(tmp_path / "m.pt", torch.nn.LSTM(4, 2), "mine", [INPUT], [INPUT])
    loaded = load_module(tmp_path / "m.pt", arch=f"{tmp_path}/a.py:build")
    with (
        TorchEngine(loaded, "m.pt", "cpu", None) as engine,
        pytest.raises(BadInput, match="returned 3 tensors, 1 were announced"),
    ):
        engine({"x": np.zeros((2, 4), np.float32)})


def test_bfloat16_outputs_come_as_float32(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(4, 2).to(torch.bfloat16).state_dict(), tmp_path / "w.pt")
    (tmp_path / "b.py").write_text(
        "import torch\n"
        "class Half(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.bfloat16())\n"
        "build = lambda: Half(4, 2, dtype=torch.bfloat16)\n"
    )
    loaded = load_module(tmp_path / "w.pt", arch=f"{tmp_path}/b.py:build", inputs=[INPUT])
    assert loaded.outputs == (TensorSpec("output", "bfloat16", ("N", 2)),)
    with TorchEngine(loaded, "w", "cpu", None) as engine:
        assert engine({"x": np.ones((1, 4), np.float32)})["output"].dtype == np.float32


def test_a_gpu_that_is_not_there_is_refused(weights: Path, arch: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    loaded = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT])
    with pytest.raises(Unsupported, match="cuda"):
        TorchEngine(loaded, "w", "cuda", None)


@pytest.mark.parametrize(
    ("asked", "named"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_a_gpu_is_named_by_its_number(
    monkeypatch: pytest.MonkeyPatch, asked: str, named: str
) -> None:
    """A tensor on "cuda" says "cuda:0", which is another device than "cuda" to torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    moved: list[str] = []
    module = SimpleNamespace(to=moved.append)
    engine = TorchEngine(Loaded(module, (INPUT,), (INPUT,), "module"), "m", asked, None)
    assert (engine.device, moved) == (named, [named])


def test_the_engine_takes_arrays_that_may_not_be_written_to(weights: Path, arch: Path) -> None:
    loaded = load_module(weights, arch=f"{arch}:Two", inputs=[INPUT])
    rows = np.ones((3, 4), np.float32)
    rows.flags.writeable = False
    with TorchEngine(loaded, "w", "cpu", None) as engine:
        assert engine({"x": rows})["output"].shape == (3, 2)


def test_look_counts_tensors_and_runs_no_code(tmp_path: Path) -> None:
    from deploykit.engines.torch.open import look

    weights, whole = tmp_path / "w.pt", tmp_path / "s.pt"
    torch.save(torch.nn.Linear(4, 2).state_dict(), weights)
    inputs, outputs, details = look(weights)
    assert (inputs, outputs) == ((), ())
    assert (details["kind"], details["tensors"], details["parameters"]) == ("state_dict", 2, 10)
    assert details["types"] == {"float32": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(4, 2), torch.zeros(1, 4)), whole)
    assert "not opened" in look(whole)[2]["contents"]


def test_out_of_gpu_memory_is_not_bad_input() -> None:
    with pytest.raises(OutOfMemory, match="the GPU's memory is full"), module_errors("m"):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


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
    specs = (parse_spec("x:float32[N,4]"),), (parse_spec("y:float32[N,2]"),)
    feeds = {"x": np.ones((3, 4), np.float32)}
    with TorchEngine(Loaded(module, *specs, "module"), "m", "cpu", None) as engine:
        if fails:
            with pytest.raises(BadInput, match="in float64 the model failed"):
                engine.in_float64(feeds)
        else:
            assert engine.in_float64(feeds)["y"] == pytest.approx(engine(feeds)["y"], rel=1e-5)
    assert seen[:4] == [torch.float64] * 3 + [torch.int64]
    assert [(each.data_ptr(), each.dtype) for each in tensors] == before
