"""`dk.export` of weights and of live modules: proof, samples, examples, sizes, calls."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript", "onnxruntime")

import deploykit as dk  # noqa: E402
from deploykit.core.files import manifest_path, sha256  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.data.examples import Example  # noqa: E402
from deploykit.engines.torch import loaded as live  # noqa: E402
from deploykit.evaluation import golden  # noqa: E402
from deploykit.evaluation.feeds import parity_sizes  # noqa: E402
from tests.support.onnx_zoo import linear, save  # noqa: E402

pytestmark = pytest.mark.torch

SPEC = ["image:float32[N,3,8,8]"]
IMAGE = torch.randn(2, 3, 8, 8)
nn, functional = torch.nn, torch.nn.functional


class Net(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 4, 3), nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, image: Any) -> Any:
        return self.head(self.drop(self.conv(image)).mean((2, 3)))


class Fixed(Net):
    def forward(self, image: Any) -> Any:
        x = self.conv(image).mean((2, 3))
        return self.head(x.reshape(int(math.sqrt(image.shape[0] ** 2)), 4))


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("net")
    torch.manual_seed(0)
    torch.save(Net().state_dict(), folder / "net.pt")
    return folder


def exported(net: Path, out: Path, kind: str = "Net", **more: Any) -> Any:
    return dk.export(net / "net.pt", out=out, arch=f"{__file__}:{kind}", inputs=SPEC, **more)


@pytest.fixture(scope="module")
def once(net: Path) -> Any:
    return exported(net, net / "m.onnx", profile="jetson-orin-nano-8gb")


@pytest.fixture
def made(once: Any, tmp_path: Path) -> Path:
    for file in once.path.parent.glob("m.onnx*"):
        shutil.copy(file, tmp_path)
    return tmp_path / "m.onnx"


def change_golden(path: Path, **values: str) -> None:
    document = json.loads(manifest_path(path).read_text())
    document["evidence"]["golden"] |= values
    manifest_path(path).write_text(json.dumps(document))


def test_the_manifest_says_what_was_loaded_and_how_it_was_exported(once: Any, net: Path) -> None:
    evidence = once.manifest.evidence
    source, export = evidence.source, evidence.export
    assert (source.kind, source.ran_pickle) == ("state_dict", False)
    assert source.sha256 == sha256(net / "net.pt")
    assert source.arch_sha256 == sha256(Path(__file__))
    assert (export.exporter, export.fallback, export.opset) == ("dynamo", None, 18)
    assert export.profile == "jetson-orin-nano-8gb"
    assert evidence.preflight.problems == ()
    assert {row.batch for row in once.parity.rows} == {1, 2, 7, 32}


def test_the_graph_takes_uint8_images_and_normalises_them_for_imagenet(
    once: Any, net: Path, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", image=images)
    more = {"preprocess": "imagenet", "samples": tmp_path / "d.npz"}
    made = exported(net, tmp_path / "bytes.onnx", **more)
    assert [str(spec) for spec in made.manifest.inputs] == ["image:uint8[N,8,8,3]"]
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    floats = ((images / 255 - mean) / std).transpose(0, 3, 1, 2).astype(np.float32)
    with dk.load(once.path, "cpu") as a, dk.load(made.path, "cpu") as b:
        expected, found = a({"image": floats})["output"], b({"image": images})["output"]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert made.manifest.evidence.export.preprocess.name == "imagenet"
    with np.load(golden.samples_path(made.path)) as arrays:  # the user's
        np.testing.assert_array_equal(arrays["inputs/image"], images[: golden.SAMPLES])


def test_an_export_records_samples_and_compare_replays_them(made: Path, tmp_path: Path) -> None:
    replayed = dk.compare(made)
    assert replayed.parity.passed
    assert replayed.parity.a.startswith("torch ")
    samples = golden.samples_path(made)
    with np.load(samples) as arrays:
        assert arrays["inputs/image"].shape == (golden.SAMPLES, 3, 8, 8)
        changed = {name: arrays[name] for name in arrays.files}
    changed["outputs/output"] = changed["outputs/output"] + 1
    np.savez(samples, **changed)
    with pytest.raises(dk.BadInput, match="SHA-256 differs"):
        dk.compare(made)
    change_golden(made, sha256=sha256(samples))
    with pytest.raises(dk.GateFailed, match=r"m\.onnx"):
        dk.compare(made).raise_if_over()
    for name in ("../m.golden.npz", "/etc/passwd", "a/../b", ""):
        change_golden(made, file=name)
        with pytest.raises(dk.BadInput):
            dk.compare(made)
    with pytest.raises(dk.DeploykitError, match="no golden samples"):
        dk.compare(save(linear(), tmp_path / "x.onnx"))


def test_artefacts_made_from_an_export_keep_its_golden_samples(made: Path, tmp_path: Path) -> None:
    half = dk.quantize(made, "fp16", tmp_path / "h.onnx")
    built = dk.build(half.path, "cpu", out=tmp_path / "b.onnx")
    assert 1e-3 <= dk.inspect(half.path).manifest.evidence.golden.max_error < 1e-1
    for item in (half, built):
        assert dk.compare(item.path).parity.passed
        assert dk.compare(item.path).parity.a.startswith("torch ")


def test_an_axis_that_the_model_fixes_is_named_or_stated(net: Path, tmp_path: Path) -> None:
    with pytest.raises(dk.BadInput, match=r"axis.*N|N.*axis"):
        exported(net, tmp_path / "m.onnx", "Fixed")
    assert not (tmp_path / "m.onnx").exists()
    fixed = exported(net, tmp_path / "m.onnx", "Fixed", batch="4")
    assert fixed.manifest.inputs[0].shape[0] == 4


def test_the_output_must_not_be_the_input_file(net: Path) -> None:
    before = (net / "net.pt").read_bytes()
    with pytest.raises(dk.BadInput, match=r"the name says \.pt"):
        exported(net, net / "net.pt")
    assert (net / "net.pt").read_bytes() == before


def test_a_program_is_compared_within_its_exported_size_range(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=4, max=16)
    program = torch.export.export(
        torch.nn.Linear(3, 2), (torch.zeros(5, 3),), dynamic_shapes=({0: rows},)
    )
    path = tmp_path / "p.pt2"
    torch.export.save(program, path)
    made = dk.export(path, allow_pickle=True)
    assert [row.batch for row in made.manifest.evidence.parity.rows] == [4, 7, 16]
    assert made.manifest.evidence.source.ran_pickle is True
    assert any("ran code of its own" in note for note in made.notes)


# --- live modules ---


def test_a_module_is_exported_as_it_was_given_and_left_so(tmp_path: Path) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    first = dk.export(net, IMAGE, out=str(tmp_path / "net.onnx")).manifest
    assert [str(spec) for spec in first.inputs] == ["image:float32[N,3,8,8]"]
    assert first.evidence.source.model_class == f"{__name__}.Net"
    assert first.made_from == (first.evidence.source.sha256,)
    assert net.training
    assert net.drop.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with dk.load(tmp_path / "net.onnx", "cpu") as engine, torch.inference_mode():
        (answer,) = engine({"image": IMAGE.numpy()}).values()
        np.testing.assert_allclose(answer, net.eval()(IMAGE).numpy(), atol=1e-5)
    net.head.bias.data += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(net)
    second = dk.export(compiled, IMAGE, out=tmp_path / "b.onnx", batch=4).manifest
    assert second.evidence.source.model_class.endswith(".Net")
    assert second.made_from != first.made_from
    assert second.inputs[0].shape == (4, 3, 8, 8)


def test_the_copy_shares_the_weights_instead_of_doubling_the_memory() -> None:
    net = Net()
    loaded = live.load_live(net, live.specs_from(net, IMAGE)[0])
    copied = dict(loaded.module.named_parameters())["module.conv.weight"]
    assert copied.data_ptr() == net.conv.weight.data_ptr()
    assert copied is not net.conv.weight


def test_a_dict_is_passed_by_name_and_extra_dynamic_axes_are_named(tmp_path: Path) -> None:
    def scaled(me: Any, ids: Any, scale: Any) -> Any:
        return {"sum": (functional.embedding(ids, me.table) * scale).sum(-1)}

    example = {"other": torch.ones(2, 5, 1), "x": torch.zeros(2, 5, dtype=torch.int64)}
    axes = {"x": {1: "T"}, "other": {1: "T"}}
    made = dk.export(Applied(scaled), example, out=tmp_path / "m.onnx", dynamic_axes=axes)
    inputs = {str(spec) for spec in made.manifest.inputs}
    assert inputs == {"x:int64[N,T]", "other:float32[N,T,1]"}
    assert [str(spec) for spec in made.manifest.outputs] == ["sum:float32[N,T]"]
    specs, _ = live.specs_from(Applied(scaled), (example["x"], example["other"]))  # by position
    assert [spec.name for spec in specs] == ["x", "other"]


def test_an_example_describes_the_inputs_of_a_file_of_weights(net: Path) -> None:
    made = dk.export(str(net / "net.pt"), IMAGE, arch=f"{__file__}:Net")
    assert made.path == net / "net.onnx"
    assert made.manifest.inputs[0].shape == ("N", 3, 8, 8)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"example_inputs": IMAGE, "out": None}, "`out` is missing"),
        ({}, "what its inputs are"),
        ({"example_inputs": "x.onnx"}, "`example_inputs` is a path"),
        ({"example_inputs": 3}, "'image' is a int, not a tensor"),
        ({"model": 7}, "`model` is a int"),
        ({"batch": "-1"}, "`batch` -1: must be 'dynamic'"),
        ({"batch": 0}, "`batch` 0: must be 'dynamic'"),
        ({"example_inputs": IMAGE, "dynamic_axes": {"x": {1: "T"}}}, "not an input"),
        ({"example_inputs": IMAGE, "dynamic_axes": {"image": {9: "T"}}}, "has no axis 9"),
        ({"dynamic_axes": {"image": {1: "T"}}}, "`dynamic_axes` needs `example_inputs`"),
        ({"example_inputs": IMAGE, "inputs": ["x:float32[N]"]}, "both describe the inputs"),
    ],
)
def test_a_wrong_call_names_the_parameter(
    given: dict[str, Any], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dk.BadInput, match=wrong):
        dk.export(**{"model": Net(), "out": "x.onnx", **given})
    assert not list(tmp_path.iterdir())


def statistics(_: Any, x: Any) -> Any:
    """An x-vector's pooling: one step has no deviation, which is NaN in PyTorch."""
    return torch.cat([x.mean(1), x.std(dim=1)], 1).sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("function", "spec", "least"),
    [
        (lambda _, x: x.unfold(1, 4, 2).mean(-1), "x:float32[N,T]", 4),
        (statistics, "x:float32[N,T,4]", 2),
    ],
)
def test_a_model_is_compared_from_the_length_on_that_has_an_answer(
    tmp_path: Path, function: Any, spec: str, least: int
) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        made = dk.export(Applied(function), inputs=[spec], out=tmp_path / "m.onnx")
    parity = made.manifest.evidence.parity
    assert parity.passed
    assert {row.batch for row in parity.rows} == {1, 2, 7, 32}
    assert f"the model takes axis T from {least} on" in made.notes
    sizes = [each["T"] for each in parity_sizes(made.manifest.inputs, {"T": (least, None)})]
    assert sizes == [5, 12, least, 33]
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


def test_float64_bounds_the_error_only_where_float32_is_not_exact(
    once: Any, tmp_path: Path
) -> None:
    parity: Any = dk.export(Cancels(), inputs=["x:float32[N,64]"], out=tmp_path / "m.onnx").parity
    assert parity.passed
    assert parity.worst.error > parity.max_error
    assert all(row.float32_error for row in parity.rows)
    assert [row.float32_error for row in once.parity.rows] == [None] * 4


@pytest.mark.parametrize(
    ("module", "cure"),
    [
        (torch.nn.Linear(4, 3, device="meta"), "give the model its weights first"),
        (torch.nn.LazyLinear(3), "run the model once before the export"),
    ],
    ids=["meta", "lazy"],
)
def test_a_model_without_weights_is_refused_with_the_cure(
    module: Any, cure: str, tmp_path: Path
) -> None:
    with pytest.raises(dk.BadInput) as refused:
        dk.export(module, torch.rand(2, 4), out=tmp_path / "m.onnx")
    assert cure in str(refused.value.hint)


def test_threads_export_one_after_the_other(tmp_path: Path) -> None:
    def export(name: str) -> bool:
        made = dk.export(torch.nn.Linear(4, 3), torch.rand(2, 4), out=tmp_path / name)
        return made.manifest.evidence.parity.passed

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(export, ("a.onnx", "b.onnx", "c.onnx")))


def test_the_only_input_needs_no_list(tmp_path: Path) -> None:
    made = dk.export(torch.nn.Linear(4, 3), inputs="x:float32[N,4]", out=tmp_path / "m.onnx")
    assert [str(each) for each in made.manifest.inputs] == ["x:float32[N,4]"]


class Packed(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, *keys: Any) -> None:
        super().__init__()
        self.keys, self.linear = keys, torch.nn.Linear(4, 3)

    def forward(self, batch: Any) -> Any:
        first, second = (batch[key] for key in self.keys)
        return self.linear(first) + second


X, BIAS = torch.randn(2, 4), torch.randn(2, 3)


@pytest.mark.parametrize("example", [{"x": X, "bias": BIAS}, ([X, BIAS],)], ids=["dict", "list"])
def test_a_model_that_takes_its_tensors_in_one_argument_is_refused_with_the_rewrite(
    tmp_path: Path, example: Any
) -> None:
    keys = tuple(example) if isinstance(example, dict) else (0, 1)
    with pytest.raises(dk.DeploykitError) as caught:
        dk.export(Packed(*keys), example, out=tmp_path / "m.onnx")
    assert caught.value.exit_code == 2
    assert "whose forward takes them one by one" in str(caught.value.hint)


@pytest.mark.parametrize("order", [1, -1], ids=["x first", "scalar first"])
def test_an_input_without_axes_is_exported(tmp_path: Path, order: int) -> None:
    specs = ["x:float32[N,4]", "other:float32[]"][::order]
    module = Applied(lambda _, x, temperature: x * temperature)
    made: Any = dk.export(module, inputs=specs, out=tmp_path / "m.onnx")
    assert made.parity.passed


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


def summed(_: Any, x: Any, edges: Any) -> Any:
    return torch.zeros_like(x).index_add(0, edges[1], x.index_select(0, edges[0]))


BOXES = torch.tensor([[[0, 1, 5, 9]] * 6, [[2, 2, 4, 30]] * 6])
INDEX = torch.tensor([[0, 1, 2, 0, 1]] * 2)
EDGES = torch.tensor([[5, 0, 1, 3, 4], [0, 5, 2, 1, 5]])
T_AXIS = {"x": {1: "T"}}
EXPORTED: dict[str, tuple[Any, int, Any, dict[str, Any]]] = {
    "sizes of the example": (strided, 0, {"x": torch.randn(2, 4000)}, T_AXIS),
    "integers of the example": (widths, 0, {"x": BOXES}, T_AXIS),
    "indices of the example": (scattered, 5, (torch.randn(2, 5), INDEX), {}),
    "edges that point at rows": (summed, 0, (torch.randn(6, 8), EDGES), {"other": {1: "E"}}),
    "at the end of the table": (positions, 0, {"x": torch.randn(2, 32)}, T_AXIS),
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
    with pytest.raises(dk.BadInput, match="'8<=9' is neither a size nor a name"):
        dk.export(module, inputs=["x:float32[N,8<=9]"], out=tmp_path / "m.onnx")


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
        ["up to 100 the", "up to 10000 the"],
    ),
    "a hidden row": (
        attended,
        (torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool)),
        ["'other' false everywhere"],
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


def test_a_hidden_row_in_the_samples_is_no_random_number(tmp_path: Path) -> None:
    keep = np.ones((16, 6), bool)
    keep[::2] = False
    x = np.random.default_rng(0).normal(size=(16, 6, 8)).astype(np.float32)
    np.savez(tmp_path / "s.npz", x=x, other=keep)
    example = (torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(dk.GateFailed, match="is above") as caught:
        dk.export(Applied(attended), example, out=tmp_path / "m.onnx", samples=tmp_path / "s.npz")
    assert "random numbers" not in caught.value.message


def test_hooks_see_the_arguments_that_go_by_position(tmp_path: Path) -> None:
    module = Applied(lambda _, x: x * 2, width=4)
    module.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    made: Any = dk.export(module, torch.randn(2, 4), out=tmp_path / "m.onnx")
    assert made.parity.passed
