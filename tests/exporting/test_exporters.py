"""Which exporter writes the file, and what is in it: dtypes, names, sizes, external weights."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

from torch import nn  # noqa: E402

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import TensorSpec, parse_spec  # noqa: E402
from deploykit.engines.engine import load  # noqa: E402
from deploykit.exporting.onnx import export_module  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

ROW, ANSWER = parse_spec("x:float32[N,4]"), parse_spec("y:float32[N,4]")
BOTH = pytest.mark.parametrize("scripted", [False, True], ids=["dynamo", "torchscript"])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "m.onnx"


def ran(path: Path, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    with load(path, "cpu") as engine:
        return engine(feeds)


def rows(count: int, width: int = 4, start: float = -3.0) -> np.ndarray:
    return (np.arange(count * width, dtype=np.float32) + start).reshape(count, width)


def script(module: nn.Module, *, scripted: bool) -> nn.Module:
    """TorchScript of the module, which goes through the older exporter."""
    found: nn.Module = torch.jit.script(module.eval()) if scripted else module.eval()
    return found


class Wrapper(nn.Module):
    """As deploykit wraps a user's module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.module(*inputs)
        return found if isinstance(found, tuple) else (found,)


def test_the_current_exporter_gives_the_same_bytes_and_no_paths(out: Path, tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    done = export_module(layer, [ROW], [ANSWER], out, opset=18)
    assert (done.exporter, done.opset, done.fallback) == ("dynamo", 18, "")
    versions = onnx.load(out).opset_import
    assert [item.version for item in versions if item.domain == ""] == [18]
    with load(out, "cpu") as engine:
        assert (engine.inputs, engine.outputs) == ((ROW,), (ANSWER,))
    export_module(layer, [ROW], [ANSWER], tmp_path / "again.onnx", opset=18)
    assert out.read_bytes() == (tmp_path / "again.onnx").read_bytes()
    assert b"site-packages" not in out.read_bytes()
    assert b"aten" not in out.read_bytes()


class Address(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        aligned = x.data_ptr() % 4 == 0
        return (x * 3 if aligned else x * 2,)


def test_the_older_exporter_is_the_fallback_and_the_reason_is_noted(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = export_module(Address(), [ROW], [ANSWER], out)
    assert done.exporter == "torchscript"
    assert "data pointer" in done.fallback
    assert "`aligned = x.data_ptr() % 4 == 0`" in done.fallback
    np.testing.assert_array_equal(ran(out, x=rows(3))["y"], rows(3) * 3)
    assert capfd.readouterr() == ("", "")


class ChosenColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.order = torch.tensor([3, 0, 2, 1])
        self.kept = torch.tensor([True, False, True, True])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = x[..., self.order]
        return (torch.stack([x[..., at] for at, kept in enumerate(self.kept) if kept], -1),)


def test_a_branch_by_constants_is_written_where_integers_pick_columns(out: Path) -> None:
    done = export_module(ChosenColumns(), [ROW], [parse_spec("y:float32[N,3]")], out)
    assert "decides by tensors that no input changes" in done.fallback
    np.testing.assert_array_equal(ran(out, x=rows(3))["y"], rows(3)[:, [3, 2, 1]])


class Unit(nn.Module):
    """Divides a row by its norm and a small number: 0 for a row of zeros."""

    def __init__(self, small: float) -> None:
        super().__init__()
        self.small = small

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        norm = x.pow(2).sum(-1, keepdim=True).sqrt()
        return ((x + 0) * 1 / (norm + self.small) * 1.000004,)


@pytest.mark.parametrize("small", [1e-8, 1e-30])
def test_a_small_constant_is_no_zero_and_a_factor_near_1_no_1(out: Path, small: float) -> None:
    module = Unit(small)
    assert export_module(module, [ROW], [ANSWER], out).exporter == "dynamo"
    kinds = [node.op_type for node in onnx.load(out).graph.node]
    assert (kinds.count("Add"), kinds.count("Mul")) == (1, 1)  # not x + 0 and x * 1
    x = np.concatenate([np.zeros((2, 4), np.float32), rows(2) + 0.5])
    expected = module(torch.tensor(x))[0].numpy()
    assert not expected[:2].any()
    np.testing.assert_allclose(ran(out, x=x)["y"], expected, rtol=1e-6)


class Listed(nn.Module):
    """Gives a function a list of tensors; returns its input, and one tensor twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (y,) = torch.atleast_1d([x])
        y = y.unsqueeze(1).expand(-1, 3, -1) + 1
        return x, y, y


def test_a_list_of_tensors_becomes_a_sequence_and_outputs_keep_their_order(out: Path) -> None:
    names = {"same": "[N,4]", "wide": "[N,3,4]", "again": "[N,3,4]"}
    outputs = [parse_spec(f"{name}:float32{shape}") for name, shape in names.items()]
    export_module(Listed(), [ROW], outputs, out, sizes={"N": 3})
    found, wide = ran(out, x=rows(2)), np.stack([rows(2) + 1] * 3, 1)
    np.testing.assert_equal(found, {"same": rows(2), "wide": wide, "again": wide})
    with pytest.raises(BadInput, match="3 outputs, the model has 1: same"):
        export_module(Listed(), [ROW], outputs[:1], out)


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if bool(x.sum() > 0) else x - 1


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "bare"])
def test_torchscript_goes_through_the_older_exporter_and_keeps_its_branches(
    out: Path, wrapped: bool
) -> None:
    scripted = torch.jit.script(Gate())
    done = export_module(Wrapper(scripted) if wrapped else scripted, [ROW], [ANSWER], out)
    assert (done.exporter, done.fallback) == ("torchscript", "the file is TorchScript")
    for x in (rows(2, start=5), rows(2, start=-50)):
        np.testing.assert_array_equal(ran(out, x=x)["y"], x + np.sign(x.sum()))


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 1)

    def forward(
        self,
        ids: torch.Tensor,
        keep: torch.Tensor,
        half: torch.Tensor,
        bytes_: torch.Tensor,
        unread: torch.Tensor,
    ) -> tuple[torch.Tensor]:
        del unread
        known = torch.where(keep, self.embedding(ids)[:, :, 0], 0.0)
        return (known + half.float() + bytes_.float(),)


@BOTH
def test_inputs_keep_their_dtypes_and_share_two_dynamic_axes(out: Path, scripted: bool) -> None:
    """An input that the model does not read stays an input."""
    specs = ("ids:int64", "keep:bool", "half:float16", "bytes_:uint8", "unread:int64")
    inputs = tuple(parse_spec(f"{text}[N,T]") for text in specs)
    module = Kinds().eval()
    outputs = [parse_spec("y:float32[N,T]")]
    export_module(script(module, scripted=scripted), inputs, outputs, out)
    with load(out, "cpu") as engine:
        assert engine.inputs == inputs
        for shape in ((1, 1), (5, 3), (2, 9)):
            random = np.random.default_rng(0)
            feeds = {spec.name: random.integers(0, 2, shape).astype(spec.dtype) for spec in inputs}
            with torch.inference_mode():
                (expected,) = module(*map(torch.from_numpy, feeds.values()))
            np.testing.assert_allclose(engine(feeds)["y"], expected.numpy(), rtol=1e-6)


@BOTH
def test_weights_have_the_users_names_and_lie_in_one_external_file_above_the_limit(
    tmp_path: Path, out: Path, scripted: bool
) -> None:
    user = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    module = Wrapper(Wrapper(script(user, scripted=scripted)))
    two = tmp_path / "two" / "m.onnx"
    two.parent.mkdir()
    export_module(module, [ROW], [ANSWER], out)
    export_module(module, [ROW], [ANSWER], two, max_bytes=2000)
    assert sorted(file.name for file in two.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "two"]
    assert two.stat().st_size < 2000 < (two.parent / "m.onnx.data").stat().st_size
    stored = onnx.load(two, load_external_data=False).graph.initializer
    places = {entry.value for t in stored for entry in t.external_data if entry.key == "location"}
    assert places == {"m.onnx.data"}
    np.testing.assert_array_equal(ran(out, x=rows(5))["y"], ran(two, x=rows(5))["y"])
    names = {tensor.name for tensor in stored}
    assert {"0.weight", "0.bias", "2.weight", "2.bias"} <= names
    assert not any(name.startswith("module.") for name in names)


class Window(nn.Module):
    """x (N, T) -> (N, T - 8): takes T from 9 on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 9)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.conv(x[:, None])[:, 0],)


@BOTH
def test_a_model_that_needs_longer_inputs_is_exported_at_longer_ones(
    out: Path, scripted: bool
) -> None:
    specs = [parse_spec("x:float32[N,T]")], [parse_spec("y:float32[N,U]")]
    module = script(Window(), scripted=scripted)
    if scripted:
        with pytest.raises(BadInput, match="cannot export the model"):
            export_module(module, *specs, out)
    export_module(module, *specs, out, sizes={"T": 30} if scripted else None)
    assert ran(out, x=rows(3, 20))["y"].shape == (3, 12)


@BOTH
def test_image_models_are_exported_at_sizes_large_enough_for_their_pooling(
    out: Path, scripted: bool
) -> None:
    halved = [nn.MaxPool2d(2) for _ in range(5)]
    module = nn.Sequential(*halved, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    image, answer = parse_spec("image:float32[N,3,H,W]"), parse_spec("y:float32[N,3]")
    export_module(Wrapper(script(module, scripted=scripted)), [image], [answer], out)
    pixels = np.ones((2, 3, 70, 130), np.float32)
    np.testing.assert_array_equal(ran(out, image=pixels)["y"], np.ones((2, 3)))


class Causal(nn.Module):
    """Torch's layers look at a mask's values to find out whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        values: torch.Tensor = self.layers(x, mask)
        return values


def test_an_encoder_takes_any_length_and_torchs_settings_are_put_back(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    detect, logger = nn.modules.transformer._detect_is_causal_mask, logging.getLogger("torch")
    before = (logger.handlers, logger.propagate)
    module, spec = Wrapper(Causal()).eval(), TensorSpec("x", "float32", ("N", "T", 8))
    export_module(module, [spec], [replace(spec, name="y")], out)
    assert nn.modules.transformer._detect_is_causal_mask is detect
    assert torch.backends.mha.get_fastpath_enabled()
    assert (logger.handlers, logger.propagate) == before
    for shape in ((1, 1, 8), (3, 11, 8)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        with torch.inference_mode():
            expected = module(torch.from_numpy(x))[0].numpy()
        np.testing.assert_allclose(ran(out, x=x)["y"], expected, atol=1e-5)
    assert capfd.readouterr() == ("", "")
