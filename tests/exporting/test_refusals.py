"""What a graph cannot hold is refused with its line and a cure; what only looks so is exported."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.support.export_modules import export_module
from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.core.errors import BadInput, DeploykitError  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
nn, functional = torch.nn, torch.nn.functional
SOURCE = [line.strip() for line in Path(__file__).read_text(encoding="utf-8").splitlines()]


def at(code: str, function: str = "forward") -> str:
    """The line of this file that is `code`, as messages name it."""
    return f"test_refusals.py:{SOURCE.index(code) + 1}, in {function}: `{code}`"


class Applied(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any, other: Any = None) -> Any:
        return self.function(x) if other is None else self.function(x, other)


IDS, STEPS, ROWS = (
    {"inputs": [spec]} for spec in ("ids:int64[N,T]", "x:float32[N,T]", "x:float32[N,4]")
)
INDEX = torch.tensor([[0, 1, 2, 0, 1]] * 2)
TABLE = torch.randn(32, 4)
WHERE = "torch.where"
REFUSED: list[Any] = []


def refused(*said: str, **given: Any) -> Callable[[Any], Any]:
    """Expect a refusal of a function, or of what a class or function without parameters makes."""

    def add(made: Any) -> Any:
        takes = made.__code__.co_argcount if hasattr(made, "__code__") else 0
        module = Applied(made) if takes else made()
        REFUSED.append(pytest.param(module, given or ROWS, said, id=made.__name__))
        return made

    return add


@refused("in branch: `if x.sum() > 0:`", WHERE)
def branch(x: Any) -> Any:
    if x.sum() > 0:
        return x + 1
    return x - 1


@refused("in branch_after_constants: `if x.max() > 1:` decides by the data", WHERE)
def branch_after_constants(x: Any) -> Any:
    if torch.tensor([1.0, 2.0]).sum() > 2:  # where torch stops
        x = x + 1
    if x.max() > 1:
        x = x + 1
    return x


@refused("axis T (axis 1 of input 'x') at", "`for step in range(x.shape[1]):`", **STEPS)
def per_step(x: Any) -> Any:
    for step in range(x.shape[1]):
        x = x + step
    return x


@refused("data pointer", "older exporter would keep one branch at")
def address(x: Any) -> Any:
    if x.data_ptr() % 4 == 0 and bool(x.sum() > -1):
        return x * 3
    return x * 2


@refused(
    "ONNX has no operator for aten._linalg_svd (test_refusals.py:",
    "before the export where it is of weights",
    inputs=["x:float32[N,T,4]"],
)
def svd(x: Any) -> Any:
    return torch.linalg.svd(x)[1]


@refused("the model draws random numbers at test_refusals.py:", "training=self.training")
def drops(x: Any) -> Any:
    return functional.dropout(x, 0.3)


@refused("the model changes its own 'calls' at test_refusals.py:", "no state between calls")
class Counts(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x + self.calls


@refused("in draws: `return", "decides by the data")
def draws(x: Any) -> Any:
    return torch.distributions.Normal(x, 1.0, validate_args=True).rsample()


@refused("in normalizes: `return functional.batch_norm(", "training=self.training")
def normalizes(x: Any) -> Any:
    return functional.batch_norm(x, None, None, training=True)


@refused("in split: `", "x.split(2, dim=1)", "x.unflatten(dim, (-1, length))", **STEPS)
def split(x: Any) -> Any:
    return torch.cat([part * at for at, part in enumerate(x.split(2, dim=1))], 1)


@refused("in pooled: `return functional.max_pool1d", "x.amax(dim)", **STEPS)
def pooled(x: Any) -> Any:
    return functional.max_pool1d(x.unsqueeze(1), x.shape[1]).flatten(1)


@refused(
    "writes scatter_reduce(reduce='mean') unlike PyTorch (test_refusals.py",
    "divide by the counts",
    example_inputs=(torch.randn(2, 5), INDEX),
)
def reduced(x: Any, index: Any) -> Any:
    return torch.zeros(x.shape[0], 3).scatter_reduce(1, index, x, "mean")


@refused(
    "writes avg_pool(divisor_override) unlike PyTorch",
    "window's area",
    inputs=["x:float32[N,3,8,8]"],
)
def divided(x: Any) -> Any:
    return functional.avg_pool2d(x, 2, divisor_override=3)


@refused("an arange that falls", "flip", **STEPS)
def falling(x: Any) -> Any:
    return x[..., None] * functional.embedding(torch.arange(x.shape[1] - 1, -1, -1), TABLE)


@refused("fixes axis T", "torch.arange(n) * step", **STEPS)
def linspace(x: Any) -> Any:
    return x + torch.linspace(0, 1, x.shape[1])


@refused("fixes axis N", "torch.gather", inputs=["x:float32[N,6]"])
def taken(x: Any) -> Any:
    return x.take_along_dim(x.argsort(1), 1)


@refused("fixes axis T", "** 0.5", **STEPS)
def root(x: Any) -> Any:
    return x / math.sqrt(x.shape[1])


@refused("computes in bfloat16", "without torch.autocast", example_inputs=torch.randn(2, 4))
class Cast(nn.Linear):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@refused("computes in float64", "model.float()", example_inputs=torch.randn(2, 2, 9).double())
def double() -> Any:
    return nn.Conv1d(2, 2, 3).double()


@refused("in bfloat16", "the graph to bf16", example_inputs=torch.zeros(2, 4).bfloat16())
def bfloat16() -> Any:
    return nn.Linear(4, 2).bfloat16()


@refused(
    "axis N is not dynamic",
    "or its name to the axis that it is",
    example_inputs=(torch.randn(3, 6, 4), torch.randn(2, 3, 8)),
)
class Recurrent(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 8, 2, batch_first=True, **more)

    def forward(self, x: Any, h: Any = None) -> Any:
        return self.layer(x)[0] if h is None else self.layer(x, (h, h))[0]


@refused(
    "no projection (`proj_size`) (test_refusals.py:",
    "nn.LSTMCell",
    inputs=["x:float32[N,T,4]"],
)
def projected() -> Any:
    return Recurrent(proj_size=3)


class Decoder(nn.Module):  # type: ignore[misc, name-defined]
    """One block of causal attention over a table of positions, as nanoGPT has it."""

    def __init__(self, branch: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch = branch
        self.token, self.place = nn.Embedding(16, 4), nn.Embedding(300, 4)
        self.register_buffer("visible", torch.tril(torch.ones(300, 300)))

    def forward(self, ids: Any) -> Any:
        length = ids.shape[1]
        if self.branch == "check" and length > 300:
            raise ValueError("too long")
        x = self.token(ids) + self.place(torch.arange(length))
        scores = x @ x.transpose(1, 2)
        if length > 1:
            scores = scores.masked_fill(self.visible[:length, :length] == 0, -1e4)
        x = scores.softmax(-1) @ x
        if self.branch == "short" and length < 20:
            x = x + 1
        return x


@refused(at('if self.branch == "short" and length < 20:'), WHERE, **IDS)
def short() -> Any:
    return Decoder("short")


@pytest.mark.parametrize(("module", "given", "said"), REFUSED)
def test_a_refusal_names_its_cause_with_its_line_and_a_cure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], module: Any, given: Any, said: Any
) -> None:
    with pytest.raises(DeploykitError) as caught:
        dk.export(module.eval(), out=tmp_path / "m.onnx", **given)
    found = f"{caught.value.message} {caught.value.hint}"
    assert [words for words in said if words not in found] == []
    left = {file.name.partition(".")[2] for file in tmp_path.iterdir()}
    assert left <= {f"rejected.onnx{end}" for end in ("", ".json", ".golden.npz")}
    assert capfd.readouterr() == ("", "")
    assert "lstm" not in vars(torch._VF)


class TwoRows(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1)


def scripted() -> Any:
    return torch.jit.script(TwoRows())


def seven_rows() -> Any:
    return Applied(lambda x: x + TABLE[:7])


@pytest.mark.parametrize(
    ("build", "given", "said"),
    [
        (TwoRows, {}, "axis 0 (N) of output 'y' at 2"),
        (scripted, {}, "axis 0 (N) of output 'y' at 2"),
        (seven_rows, {}, "axis N (axis 0 of input 'x') at 7"),
        (TwoRows, {"opset": 17}, "opset 17 is not offered"),
        (scripted, {"opset": 21}, "opset 21 is not offered for TorchScript"),
    ],
)
def test_an_output_of_another_size_than_declared_and_another_opset_are_refused(
    tmp_path: Path, build: Any, given: dict[str, Any], said: str
) -> None:
    specs = [parse_spec("x:float32[N,4]")], [parse_spec("y:float32[N,M]")]
    with pytest.raises(BadInput) as caught:
        export_module(build(), *specs, tmp_path / "m.onnx", **given)
    assert said in caught.value.message
    assert list(tmp_path.iterdir()) == []


# --- what only looks so ---


@pytest.mark.parametrize("branch", ["none", "check"])
def test_a_check_of_the_length_is_exported_and_reported(tmp_path: Path, branch: str) -> None:
    made = dk.export(Decoder(branch), out=tmp_path / "m.onnx", **IDS)
    notes = [note for note in made.notes if "sizes" in note]
    assert len(notes) == (branch == "check")
    for note in notes:
        assert "for sizes with T <= 300 (test_refusals.py:" in note
        assert 'if self.branch == "check" and length > 300:' in note


class Quantized(nn.Linear):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        scales = self.weight.detach().abs().amax(1) / 127
        zeros = torch.zeros(scales.shape[0], dtype=torch.int32)
        w = torch.fake_quantize_per_channel_affine(self.weight, scales, zeros, 0, -128, 127)
        x = torch.fake_quantize_per_tensor_affine(x, 1 / 127, 0, -128, 127)
        return functional.linear(x, w, self.bias)


def test_fake_quantization_is_kept(tmp_path: Path) -> None:
    dk.export(Quantized(4, 3).eval(), torch.rand(2, 4), out=tmp_path / "m.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert operators.count("DequantizeLinear") == 2


def padded(x: Any) -> Any:
    return functional.pad(x, (0, x.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)


def test_pieces_as_an_axis_are_exported(tmp_path: Path) -> None:
    x = torch.arange(10.0).reshape(2, 5)
    assert torch.equal(padded(x), torch.stack([x[:, :2].sum(1), x[:, 2:4].sum(1), x[:, 4]], 1))
    made = dk.export(Applied(padded), out=tmp_path / "m.onnx", **STEPS)
    assert made.manifest.evidence.parity.passed
    assert not [note for note in made.notes if "sizes" in note]


# --- detectors: code of torchvision that selects boxes by the data, which a tracer takes whole ---

# written as torchvision/ops/boxes.py is: a branch on a size that follows the data, scripted
SELECTS = """
import torch

def select(boxes, least):
    return _among(boxes[torch.where(boxes[:, 0] > least)[0]])

@torch.jit._script_if_tracing
def _among(boxes):
    if boxes.numel() == 0:
        return torch.zeros((0, 4))
    return boxes - boxes.max()

@torch.jit._script_if_tracing
def doubled(rows):
    found = torch.zeros(0, 4)
    for at in range(rows.size(0)):
        found = torch.cat((found, 2 * rows[at].unsqueeze(0)))
    return found.unsqueeze(1)
"""


@pytest.fixture
def selects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Functions of a folder of that name; torchvision itself may not fit this torch."""
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "selects_boxes.py").write_text(SELECTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("selects_boxes")


class Detector(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, select: Any, branch: bool) -> None:
        super().__init__()
        self.select, self.branch = select, branch

    def forward(self, images: Any) -> Any:
        boxes = images.flatten(1).reshape(-1, 4)
        if self.branch and boxes.sum() > 0:
            boxes = boxes * 2
        return self.select(boxes, 0.5)


IMAGES: dict[str, Any] = {"inputs": ["images:float32[1,3,8,8]"]}


def test_a_detector_goes_through_the_older_exporter_with_an_output_of_any_size(
    tmp_path: Path, selects: Any
) -> None:
    module = Detector(selects.select, branch=False)
    made = dk.export(module, out=tmp_path / "m.onnx", **IMAGES)
    assert made.manifest.evidence.export.exporter == "torchscript"
    assert "selects_boxes.py:9" in made.manifest.evidence.export.fallback
    assert [str(each) for each in made.manifest.outputs] == ["output:float32[output_0,4]"]
    with dk.load(tmp_path / "m.onnx", "cpu") as engine:
        for least in (0.0, 0.4, 2.0):  # many boxes, some, none
            images = torch.rand(1, 3, 8, 8) - least
            found = torch.from_numpy(engine({"images": images.numpy()})["output"])
            torch.testing.assert_close(found, module(images), atol=1e-6, rtol=0)
    with pytest.raises(BadInput) as caught:
        dk.export(Detector(selects.select, branch=True), out=tmp_path / "n.onnx", **IMAGES)
    assert at("if self.branch and boxes.sum() > 0:") in caught.value.message


def test_a_loop_over_the_boxes_keeps_them_all(tmp_path: Path, selects: Any) -> None:
    """As torchvision pastes the masks of Mask R-CNN; the optimizer kept the first alone."""
    traced = torch.jit.trace(Applied(selects.doubled), torch.ones(2, 4))
    dk.export(traced, out=tmp_path / "m.onnx", **ROWS)
    with dk.load(tmp_path / "m.onnx", "cpu") as engine:
        for count in (1, 3, 0):
            rows = torch.arange(4.0 * count).reshape(count, 4)
            found = torch.from_numpy(engine({"x": rows.numpy()})["output"])
            assert torch.equal(found, 2 * rows[:, None])
