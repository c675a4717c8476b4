"""What must not be written, a frozen branch or axis, and the line that is named instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import TensorSpec, parse_spec  # noqa: E402
from deploykit.exporting.onnx import export_module  # noqa: E402
from tests.support.exporters import models  # noqa: E402

pytestmark = pytest.mark.torch

X = parse_spec("x:float32[N,T,4]")
Y = TensorSpec("y", "float32", X.shape)


def refused(module: torch.nn.Module, out: Path, **options: object) -> BadInput:
    with pytest.raises(BadInput) as caught:
        export_module(module.eval(), [X], [Y], out, **options)
    assert list(out.parent.iterdir()) == []
    return caught.value


def test_a_branch_on_the_data_is_refused_naming_its_line(tmp_path: Path) -> None:
    error = refused(models.Wrapper(models.Branch()), tmp_path / "m.onnx")
    code = "if x.sum() > 0:"
    assert f"models.py:{models.line_of(code)}, in forward: `{code}`" in error.message
    assert "torch.where" in str(error.hint)


def test_a_loop_on_the_data_is_refused_naming_its_line_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(models.Repeat(), tmp_path / "m.onnx")
    assert "`while (x < 10).all():`" in error.message
    assert capfd.readouterr() == ("", "")


def test_an_axis_that_a_loop_fixes_is_named_with_its_line(tmp_path: Path) -> None:
    error = refused(models.Wrapper(models.PerStep()), tmp_path / "m.onnx")
    code = "for step in range(x.shape[1]):"
    assert "axis T (axis 1 of input 'x') at 3" in error.message
    assert f"models.py:{models.line_of(code)}, in forward: `{code}`" in error.message


def test_an_axis_that_a_table_fixes_is_named_with_the_table_s_size(tmp_path: Path) -> None:
    error = refused(models.Positions(), tmp_path / "m.onnx")
    assert "axis T (axis 1 of input 'x') at 7" in error.message
    assert "`return (x + self.table,)`" in error.message


def test_axes_that_must_be_equal_are_named(tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x + y,)

    inputs = [parse_spec("x:float32[N,4]"), parse_spec("y:float32[M,4]")]
    with pytest.raises(BadInput, match="M and N must always be equal"):
        export_module(Sum(), inputs, [parse_spec("z:float32[N,4]")], tmp_path / "m.onnx")


@pytest.mark.parametrize("scripted", [False, True], ids=["dynamo", "torchscript"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_an_output_of_a_fixed_size_is_named(tmp_path: Path, scripted: bool) -> None:
    module = torch.jit.script(models.TwoRows()) if scripted else models.TwoRows()
    with pytest.raises(BadInput, match=r"axis 0 \(N\) of output 'y' at 2"):
        export_module(module, [X], [parse_spec("y:float32[N,M]")], tmp_path / "m.onnx")


def test_an_error_in_the_model_names_its_line(tmp_path: Path) -> None:
    error = refused(models.Wrapper(models.Broken()), tmp_path / "m.onnx")
    assert "has no attribute 'absent'" in error.message
    assert "`return (x + self.absent,)`" in error.message


def test_an_operator_that_neither_exporter_has_is_named_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(models.Svd(), tmp_path / "m.onnx")
    assert "ONNX has no operator for aten._linalg_svd (models.py:" in error.message
    assert "`return (torch.linalg.svd(x)[1],)`" in error.message
    assert "before the export where it is of weights" in str(error.hint)
    assert capfd.readouterr() == ("", "")


def test_the_number_of_outputs_must_be_the_specs(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="3 outputs, the model has 1: y"):
        export_module(models.Outputs(), [X], [Y], tmp_path / "m.onnx")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("scripted", "opset"), [(False, 17), (True, 21)], ids=str)
def test_an_opset_that_is_not_offered_is_refused(
    tmp_path: Path, scripted: bool, opset: int
) -> None:
    module = torch.jit.script(models.Gate()) if scripted else models.Branch()
    which = " for TorchScript" if scripted else ""
    error = refused(module, tmp_path / "m.onnx", opset=opset)
    assert error.message == f"opset {opset} is not offered{which}"
