"""`dk.export` of a live nn.Module with example inputs."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import deploykit as dk  # noqa: E402
from deploykit.core.errors import Unsupported  # noqa: E402
from deploykit.engines.torch import loaded as live  # noqa: E402
from deploykit.evaluation.feeds import parity_sizes  # noqa: E402

pytestmark = pytest.mark.torch


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, image: Any) -> Any:
        return self.head(self.drop(self.conv(image)).mean((2, 3)))


class Pair(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 4)

    def forward(self, ids: Any, scale: Any) -> Any:
        return {"sum": (self.embed(ids) * scale).sum(-1)}


def test_a_module_and_an_example_are_exported_and_verified(tmp_path: Path) -> None:
    net, example = Net(), torch.randn(2, 3, 8, 8)
    made = dk.export(net, example, out=str(tmp_path / "net.onnx"))
    assert [str(spec) for spec in made.manifest.inputs] == ["image:float32[N,3,8,8]"]
    assert made.manifest.made_with["torch"] == version("torch")
    assert made.parity is not None
    assert {row.batch for row in made.parity.rows} >= {1, 2, 7, 32}
    with dk.load(tmp_path / "net.onnx", "cpu") as engine:
        (answer,) = engine({"image": example.numpy()}).values()
    with torch.inference_mode():
        expected = net.eval()(example).numpy()
    np.testing.assert_allclose(answer, expected, atol=1e-5)
    assert (tmp_path / "net.onnx.golden.npz").is_file()


def test_export_does_not_change_the_callers_module(tmp_path: Path) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    dk.export(net, torch.randn(1, 3, 8, 8), out=tmp_path / "net.onnx")
    assert net.training
    assert net.drop.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_copy_shares_the_weights_instead_of_doubling_the_memory() -> None:
    net = Net()
    loaded = live.load_live(net, live.specs_from(net, torch.randn(2, 3, 8, 8))[0])
    copied = dict(loaded.module.named_parameters())["module.conv.weight"]
    assert copied.data_ptr() == net.conv.weight.data_ptr()
    assert copied is not net.conv.weight


def test_the_manifest_records_the_class_and_the_hash_of_the_weights(tmp_path: Path) -> None:
    net, example = Net(), torch.randn(2, 3, 8, 8)
    first = dk.export(net, example, out=tmp_path / "a.onnx").manifest
    assert first.evidence.source.model_class == f"{__name__}.Net"
    assert first.made_from == (first.evidence.source.sha256,)
    with torch.no_grad():
        net.head.bias += 1
    second = dk.export(net, example, out=tmp_path / "b.onnx").manifest
    assert second.made_from != first.made_from


def test_a_dict_is_passed_by_name_and_extra_dynamic_axes_are_named(tmp_path: Path) -> None:
    example = {"scale": torch.ones(2, 5, 1), "ids": torch.zeros(2, 5, dtype=torch.int64)}
    made = dk.export(
        Pair(), example, out=tmp_path / "m.onnx", dynamic_axes={"ids": {1: "T"}, "scale": {1: "T"}}
    )
    assert {str(spec) for spec in made.manifest.inputs} == {
        "ids:int64[N,T]",
        "scale:float32[N,T,1]",
    }
    assert [str(spec) for spec in made.manifest.outputs] == ["sum:float32[N,T]"]
    specs, _ = live.specs_from(Pair(), (example["ids"], example["scale"]))  # by position
    assert [spec.name for spec in specs] == ["ids", "scale"]


def test_a_fixed_batch_replaces_the_examples_batch(tmp_path: Path) -> None:
    made = dk.export(Net(), torch.randn(2, 3, 8, 8), out=tmp_path / "m.onnx", batch=4)
    assert made.manifest.inputs[0].shape == (4, 3, 8, 8)


def test_input_specs_may_replace_the_example(tmp_path: Path) -> None:
    made = dk.export(Net(), inputs=["image:float32[N,3,8,8]"], out=tmp_path / "m.onnx")
    assert made.manifest.inputs[0].shape == ("N", 3, 8, 8)


def test_an_example_describes_the_inputs_of_a_file_of_weights(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(4, 2).state_dict(), tmp_path / "w.pt")
    (tmp_path / "net.py").write_text("import torch\nbuild = lambda: torch.nn.Linear(4, 2)\n")
    made = dk.export(str(tmp_path / "w.pt"), torch.ones(3, 4), arch=f"{tmp_path}/net.py:build")
    assert made.path == tmp_path / "w.onnx"
    assert made.manifest.inputs[0].shape == ("N", 4)


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda net: dk.export(net, torch.ones(1, 3, 8, 8)), "`out` is missing"),
        (lambda net: dk.export(net, out="x.onnx"), "what its inputs are"),
        (lambda net: dk.export(net, "x.onnx", out="x.onnx"), "`example_inputs` is a path"),
        (lambda net: dk.export(net, 3, out="x.onnx"), "'image' is a int, not a tensor"),
        (lambda _: dk.export(7, out="x.onnx"), "`model` is a int"),
        (lambda net: dk.export(net, out="x.onnx", batch="-1"), "`batch` -1: must be 'dynamic'"),
        (lambda net: dk.export(net, out="x.onnx", batch=0), "`batch` 0: must be 'dynamic'"),
        (
            lambda net: dk.export(
                net, torch.ones(1, 3, 8, 8), out="x.onnx", dynamic_axes={"x": {1: "T"}}
            ),
            "not an input",
        ),
        (
            lambda net: dk.export(net, out="x.onnx", dynamic_axes={"image": {1: "T"}}),
            "`dynamic_axes` needs `example_inputs`",
        ),
        (
            lambda net: dk.export(
                net, torch.ones(1, 3, 8, 8), out="x.onnx", inputs=["x:float32[N]"]
            ),
            "both describe the inputs",
        ),
    ],
    ids=["out", "inputs", "path", "number", "model", "-1", "0", "axis", "alone", "both"],
)
def test_a_wrong_call_names_the_parameter(
    call: Any, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dk.BadInput, match=wrong):
        call(Net())
    assert not list(tmp_path.iterdir())


def test_a_compiled_module_is_exported_as_the_module_inside(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(Net())
    made = dk.export(compiled, torch.randn(2, 3, 8, 8), out=tmp_path / "m.onnx")
    assert made.manifest.evidence.source.model_class.endswith(".Net")


def test_a_scripted_module_is_exported(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still what users have
        scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()))
    made = dk.export(scripted, torch.ones(2, 4), out=tmp_path / "m.onnx")
    assert made.parity is not None
    assert made.parity.passed


class Windows(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Takes 4 steps or more, as a convolution without padding does."""

    def forward(self, x: Any) -> Any:
        return x.unfold(1, 4, 2).mean(-1)


def test_a_model_with_a_least_length_is_compared_from_that_length_on(tmp_path: Path) -> None:
    made = dk.export(Windows(), inputs=["x:float32[N,T]"], out=tmp_path / "m.onnx")
    assert made.parity is not None
    assert made.parity.passed
    assert {row.batch for row in made.parity.rows} == {1, 2, 7, 32}
    assert "the model takes axis T from 4 on" in made.notes
    sizes = [each["T"] for each in parity_sizes(made.manifest.inputs, {"T": (4, None)})]
    assert sizes == [5, 12, 4, 33]


class Statistics(torch.nn.Module):  # type: ignore[misc, name-defined]
    """An x-vector's pooling: one step has no deviation, which is NaN in PyTorch."""

    def forward(self, x: Any) -> Any:
        return torch.cat([x.mean(1), x.std(dim=1)], 1).sum(1, keepdim=True)


def test_a_model_is_compared_from_the_length_on_that_has_an_answer(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        made = dk.export(Statistics(), inputs=["x:float32[N,T,4]"], out=tmp_path / "m.onnx")
    assert made.parity is not None
    assert made.parity.passed
    assert "the model takes axis T from 2 on" in made.notes
    assert not [each for each in shown if "degrees of freedom" in str(each.message)]


class Cancels(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Sums of which little is left: what is, depends on the order of the additions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = torch.nn.Linear(64, 512), torch.nn.Linear(512, 1, bias=False)
        with torch.no_grad():
            self.wide.weight[256:] = self.wide.weight[:256] * (1 + 1e-3)
            self.wide.bias[256:] = self.wide.bias[:256]
            self.narrow.weight[:, 256:] = -self.narrow.weight[:, :256]

    def forward(self, x: Any) -> Any:
        return self.narrow(torch.tanh(self.wide(x)))


def test_float64_bounds_the_error_only_where_float32_is_not_exact(tmp_path: Path) -> None:
    made = dk.export(Cancels(), inputs=["x:float32[N,64]"], out=tmp_path / "m.onnx")
    assert made.parity is not None
    assert made.parity.passed
    assert made.parity.worst.error > made.parity.max_error
    assert all(row.float32_error for row in made.parity.rows)
    exact = dk.export(Windows(), inputs=["x:float32[N,8]"], out=tmp_path / "e.onnx")
    assert [row.float32_error for row in exact.parity.rows] == [None] * 4


def test_a_model_in_bfloat16_is_refused_with_the_way_to_a_bfloat16_graph(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 2).bfloat16()
    with pytest.raises(Unsupported, match="in bfloat16") as caught:
        dk.export(module, torch.zeros(2, 4, dtype=torch.bfloat16), out=tmp_path / "m.onnx")
    assert "quantize the graph to bf16" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())


class Packed(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Takes its tensors in one argument; `keys`: of a dict, or the places of a list."""

    def __init__(self, *keys: Any) -> None:
        super().__init__()
        self.keys, self.linear = keys, torch.nn.Linear(4, 3)

    def forward(self, batch: Any) -> Any:
        first, second = (batch[key] for key in self.keys)
        return self.linear(first) + second


@pytest.mark.parametrize(
    ("keys", "pack", "rewrite"),
    [
        (("x", "bias"), lambda x, bias: {"x": x, "bias": bias}, "def forward(self, x, bias)"),
        (
            ("x", "bias"),
            lambda x, bias: ({"x": x, "bias": bias},),
            "self.model({'x': x, 'bias': bias})",
        ),
        ((0, 1), lambda x, bias: ([x, bias],), "self.model([batch_0, batch_1])"),
        ((0, 1), lambda x, bias: ((x, bias),), "self.model((batch_0, batch_1))"),
        (
            ("a.b", "c"),
            lambda x, bias: ({"a.b": x, "c": bias},),
            "self.model({'a.b': a_b, 'c': c})",
        ),
    ],
    ids=["dict", "dict-in-a-tuple", "list", "tuple", "names"],
)
def test_a_model_that_takes_its_tensors_in_one_argument_is_refused_with_the_rewrite(
    tmp_path: Path, keys: Any, pack: Any, rewrite: str
) -> None:
    example = pack(torch.randn(2, 4), torch.randn(2, 3))
    with pytest.raises(dk.DeploykitError) as caught:
        dk.export(Packed(*keys), example, out=tmp_path / "m.onnx")
    assert caught.value.exit_code == 2
    assert rewrite in str(caught.value.hint)


class Scaled(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        return x * temperature


@pytest.mark.parametrize("order", [1, -1], ids=["x first", "scalar first"])
def test_an_input_without_axes_is_exported(tmp_path: Path, order: int) -> None:
    specs = ["x:float32[N,4]", "temperature:float32[]"][::order]
    made = dk.export(Scaled(), inputs=specs, out=tmp_path / "m.onnx")
    assert made.manifest.evidence.parity.passed
