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

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.engine import load  # noqa: E402
from deploykit.exporting.onnx import export_module  # noqa: E402
from tests.support.exporters import models  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

ROW, ANSWER = parse_spec("x:float32[N,4]"), parse_spec("y:float32[N,4]")


def ran(path: Path, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    with load(path, "cpu") as engine:
        return engine(feeds)


def rows(count: int, width: int = 4, start: float = -3.0) -> np.ndarray:
    return (np.arange(count * width, dtype=np.float32) + start).reshape(count, width)


def test_the_current_exporter_is_used_and_no_fallback_is_reported(tmp_path: Path) -> None:
    done = export_module(torch.nn.ReLU(), [ROW], [ANSWER], tmp_path / "m.onnx", opset=18)
    assert (done.exporter, done.opset, done.fallback) == ("dynamo", 18, "")
    versions = onnx.load(tmp_path / "m.onnx").opset_import
    assert [item.version for item in versions if item.domain == ""] == [18]
    with load(tmp_path / "m.onnx", "cpu") as engine:
        assert (engine.inputs, engine.outputs) == ((ROW,), (ANSWER,))


def test_the_older_exporter_is_the_fallback_and_the_reason_is_noted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done = export_module(models.Address(), [ROW], [ANSWER], tmp_path / "m.onnx")
    assert done.exporter == "torchscript"
    assert "data pointer" in done.fallback
    assert "`aligned = x.data_ptr() % 4 == 0`" in done.fallback
    np.testing.assert_array_equal(ran(tmp_path / "m.onnx", x=rows(3))["y"], rows(3) * 3)
    assert capfd.readouterr() == ("", "")


def test_a_branch_by_constants_is_written_where_integers_pick_columns(tmp_path: Path) -> None:
    done = export_module(
        models.ChosenColumns(), [ROW], [parse_spec("y:float32[N,3]")], tmp_path / "m.onnx"
    )
    assert "decides by tensors that no input changes" in done.fallback
    found = ran(tmp_path / "m.onnx", x=rows(3))["y"]
    np.testing.assert_array_equal(found, rows(3)[:, [3, 2, 1]])


@pytest.mark.parametrize("small", [1e-8, 1e-12, 1e-30])
def test_a_small_constant_is_no_zero_and_a_factor_near_1_no_1(tmp_path: Path, small: float) -> None:
    example = rows(2) + 0.5
    done = export_module(models.Unit(small), [ROW], [ANSWER], tmp_path / "m.onnx")
    assert done.exporter == "dynamo"
    zeros = np.zeros((2, 4), np.float32)
    np.testing.assert_array_equal(ran(tmp_path / "m.onnx", x=zeros)["y"], zeros)
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert (kinds.count("Add"), kinds.count("Mul")) == (1, 1)  # not x + 0 and x * 1
    expected = models.Unit(small)(torch.tensor(example))[0].numpy()
    np.testing.assert_allclose(ran(tmp_path / "m.onnx", x=example)["y"], expected, rtol=1e-6)


def test_a_list_of_tensors_becomes_a_sequence_that_the_runtime_opens(tmp_path: Path) -> None:
    export_module(
        models.Listed(),
        [ROW],
        [parse_spec("y:float32[N,3,4]")],
        tmp_path / "m.onnx",
        sizes={"N": 3},
    )
    found = ran(tmp_path / "m.onnx", x=rows(2))["y"]
    np.testing.assert_array_equal(found, np.stack([rows(2) + 1] * 3, 1))


def test_a_fallback_that_would_freeze_a_branch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data pointer.*older exporter would keep one branch at"):
        export_module(models.AddressAndBranch(), [ROW], [ANSWER], tmp_path / "m.onnx")


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "bare"])
def test_torchscript_goes_through_the_older_exporter_and_keeps_its_branches(
    tmp_path: Path, wrapped: bool
) -> None:
    scripted = torch.jit.script(models.Gate())
    module = models.Wrapper(scripted) if wrapped else scripted
    done = export_module(module, [ROW], [ANSWER], tmp_path / "m.onnx")
    assert (done.exporter, done.fallback) == ("torchscript", "the file is TorchScript")
    for x in (rows(2, start=5), rows(2, start=-50)):
        expected = x + np.sign(x.sum())
        np.testing.assert_array_equal(ran(tmp_path / "m.onnx", x=x)["y"], expected)


BOTH = pytest.mark.parametrize("scripted", [False, True], ids=["dynamo", "torchscript"])


def script(module: torch.nn.Module, *, scripted: bool) -> torch.nn.Module:
    """TorchScript of the module, which goes through the older exporter."""
    found: torch.nn.Module = torch.jit.script(module.eval()) if scripted else module.eval()
    return found


@BOTH
def test_inputs_keep_their_dtypes_and_share_two_dynamic_axes(
    tmp_path: Path, scripted: bool
) -> None:
    specs = ("ids:int64", "keep:bool", "half:float16", "bytes_:uint8")
    inputs = tuple(parse_spec(f"{text}[N,T]") for text in specs)
    module = models.Kinds().eval()
    out, outputs = tmp_path / "m.onnx", [parse_spec("y:float32[N,T]")]
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
def test_an_input_that_the_model_does_not_read_stays_an_input(
    tmp_path: Path, scripted: bool
) -> None:
    class First(torch.nn.Module):
        def forward(self, unread: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
            del unread
            return (x * 2,)

    inputs = (parse_spec("unread:int64[N,T]"), ROW)
    module = script(First(), scripted=scripted)
    export_module(module, inputs, [ANSWER], tmp_path / "m.onnx")
    with load(tmp_path / "m.onnx", "cpu") as engine:
        assert engine.inputs == inputs


def test_outputs_keep_their_order_even_where_two_are_the_same(tmp_path: Path) -> None:
    outputs = [replace(ANSWER, name=name) for name in ("same", "twice", "again")]
    export_module(models.Outputs(), [ROW], outputs, tmp_path / "m.onnx")
    found = ran(tmp_path / "m.onnx", x=rows(3))
    np.testing.assert_array_equal(found["same"], rows(3))
    np.testing.assert_array_equal(found["twice"], rows(3) * 2)
    np.testing.assert_array_equal(found["again"], rows(3) * 2)


@BOTH
def test_weights_are_named_as_the_users_module_names_them(tmp_path: Path, scripted: bool) -> None:
    user = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3))
    module = models.Wrapper(models.Wrapper(script(user, scripted=scripted)))
    out = tmp_path / "m.onnx"
    image, answer = parse_spec("image:float32[N,1,4,4]"), parse_spec("y:float32[N,3]")
    export_module(module, [image], [answer], out)
    names = {tensor.name for tensor in onnx.load(out).graph.initializer}
    assert {"0.weight", "0.bias", "2.weight", "2.bias"} <= names
    assert not any(name.startswith("module.") for name in names)


def test_a_model_that_needs_longer_inputs_is_exported_at_longer_ones(tmp_path: Path) -> None:
    module = models.Window().eval()
    inputs, outputs = [parse_spec("x:float32[N,T]")], [parse_spec("y:float32[N,U]")]
    export_module(module, inputs, outputs, tmp_path / "m.onnx")
    assert ran(tmp_path / "m.onnx", x=rows(3, 20))["y"].shape == (3, 12)


def test_the_size_to_export_at_can_be_named(tmp_path: Path) -> None:
    module = models.Window().eval()
    inputs, outputs = [parse_spec("x:float32[N,T]")], [parse_spec("y:float32[N,U]")]
    module = script(module, scripted=True)
    with pytest.raises(BadInput, match="cannot export the model"):
        export_module(module, inputs, outputs, tmp_path / "m.onnx")
    export_module(module, inputs, outputs, tmp_path / "m.onnx", sizes={"T": 30})
    assert ran(tmp_path / "m.onnx", x=rows(3, 20))["y"].shape == (3, 12)


@BOTH
def test_image_models_are_exported_at_sizes_large_enough_for_their_pooling(
    tmp_path: Path, scripted: bool
) -> None:
    halved = [torch.nn.MaxPool2d(2) for _ in range(5)]
    module = torch.nn.Sequential(*halved, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    image, answer = parse_spec("image:float32[N,3,H,W]"), parse_spec("y:float32[N,3]")
    module = models.Wrapper(script(module, scripted=scripted))
    export_module(module, [image], [answer], tmp_path / "m.onnx")
    image = np.ones((2, 3, 70, 130), np.float32)
    np.testing.assert_array_equal(ran(tmp_path / "m.onnx", image=image)["y"], np.ones((2, 3)))


@BOTH
def test_weights_above_the_limit_are_written_to_one_external_file(
    tmp_path: Path, scripted: bool
) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 4))
    module = script(module, scripted=scripted)
    one, two = tmp_path / "one.onnx", tmp_path / "two" / "m.onnx"
    two.parent.mkdir()
    export_module(module, [ROW], [ANSWER], one)
    export_module(module, [ROW], [ANSWER], two, max_bytes=2000)
    assert sorted(file.name for file in two.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.onnx", "two"]
    assert two.stat().st_size < 2000 < (two.parent / "m.onnx.data").stat().st_size
    stored = onnx.load(two, load_external_data=False).graph.initializer
    places = {entry.value for t in stored for entry in t.external_data if entry.key == "location"}
    assert places == {"m.onnx.data"}
    np.testing.assert_array_equal(ran(one, x=rows(5))["y"], ran(two, x=rows(5))["y"])


def test_an_encoder_takes_any_length_and_torchs_settings_are_put_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = models.Wrapper(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    logger = logging.getLogger("torch")
    before = (logger.handlers, logger.propagate)
    spec = parse_spec("x:float32[N,T,8]")
    export_module(module.eval(), [spec], [replace(spec, name="y")], tmp_path / "m.onnx")
    assert torch.backends.mha.get_fastpath_enabled()
    assert (logger.handlers, logger.propagate) == before
    for shape in ((1, 1, 8), (3, 11, 8)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        with torch.inference_mode():
            expected = module(torch.from_numpy(x))[0].numpy()
        np.testing.assert_allclose(ran(tmp_path / "m.onnx", x=x)["y"], expected, atol=1e-5)
    assert capfd.readouterr() == ("", "")


def test_the_same_model_gives_the_same_bytes_and_no_paths(tmp_path: Path) -> None:
    first, again = tmp_path / "a.onnx", tmp_path / "b.onnx"
    layer = torch.nn.Linear(4, 4)
    for out in (first, again):
        export_module(layer, [ROW], [ANSWER], out)
    assert first.read_bytes() == again.read_bytes()
    assert b"site-packages" not in first.read_bytes()
    assert b"aten" not in first.read_bytes()


def test_a_causal_mask_made_of_the_length_is_exported(tmp_path: Path) -> None:
    """Torch's layers look at a mask's values to find out whether it is causal."""

    class Causal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Transformer(8, 2, 1, 1, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            values: torch.Tensor = self.layers(x, x, src_mask=mask, tgt_mask=mask)
            return values

    detect = torch.nn.modules.transformer._detect_is_causal_mask
    module = Causal().eval()
    specs = [parse_spec("x:float32[N,T,8]")], [parse_spec("y:float32[N,T,8]")]
    export_module(module, *specs, tmp_path / "m.onnx")
    assert torch.nn.modules.transformer._detect_is_causal_mask is detect
    with load(tmp_path / "m.onnx", "cpu") as engine:
        for rows, length in ((1, 5), (3, 9)):
            x = torch.randn(rows, length, 8)
            with torch.no_grad():
                want = module(x).numpy()
            np.testing.assert_allclose(engine({"x": x.numpy()})["y"], want, atol=1e-5)
