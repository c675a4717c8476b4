"""What must not be written, a frozen branch or axis, and the line that is named instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import TensorSpec, parse_spec  # noqa: E402
from deploykit.exporting.onnx import export_module  # noqa: E402
from tests.support.exporters import models  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

X = parse_spec("x:float32[N,T,4]")
Y = TensorSpec("y", "float32", X.shape)


def line(code: str) -> str:
    return f"models.py:{models.line_of(code)}, in forward: `{code}`"


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + y,)


TWO = [parse_spec("x:float32[N,4]"), parse_spec("y:float32[M,4]")]
Z, NM = [parse_spec("z:float32[N,4]")], [parse_spec("y:float32[N,M]")]
CASES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "a branch on the data": (
        lambda: models.Wrapper(models.Branch()),
        {},
        [line("if x.sum() > 0:"), "torch.where"],
    ),
    "a branch on the data after one that no input changes": (
        models.BranchesByATensor,
        {},
        [line("if x.max() > 1:") + " decides by the data", "torch.where"],
    ),
    "a loop on the data": (models.Repeat, {}, ["`while (x < 10).all():`"]),
    "an axis that a loop fixes": (
        lambda: models.Wrapper(models.PerStep()),
        {},
        ["axis T (axis 1 of input 'x') at 3", line("for step in range(x.shape[1]):")],
    ),
    "an axis that a table fixes": (
        models.Positions,
        {},
        ["axis T (axis 1 of input 'x') at 7", "`return (x + self.table,)`"],
    ),
    "axes that must be equal": (
        Sum,
        {"inputs": TWO, "outputs": Z},
        ["M and N must always be equal"],
    ),
    "an output of a fixed size": (
        models.TwoRows,
        {"outputs": NM},
        ["axis 0 (N) of output 'y' at 2"],
    ),
    "the same of TorchScript": (
        lambda: torch.jit.script(models.TwoRows()),
        {"outputs": NM},
        ["axis 0 (N) of output 'y' at 2"],
    ),
    "an error in the model": (
        lambda: models.Wrapper(models.Broken()),
        {},
        ["has no attribute 'absent'", "`return (x + self.absent,)`"],
    ),
    "an operator that neither exporter has": (
        models.Svd,
        {},
        [
            "ONNX has no operator for aten._linalg_svd (models.py:",
            "`return (torch.linalg.svd(x)[1],)`",
            "before the export where it is of weights",
        ],
    ),
    "the number of outputs": (models.Outputs, {}, ["3 outputs, the model has 1: y"]),
    "an opset": (models.Branch, {"opset": 17}, ["opset 17 is not offered", "18 to 23"]),
    "an opset of TorchScript": (
        lambda: torch.jit.script(models.Gate()),
        {"opset": 21},
        ["opset 21 is not offered for TorchScript"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_would_be_wrong_is_refused_with_its_line_and_nothing_is_printed_or_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    build, given, words = CASES[case]
    specs = {"inputs": [X], "outputs": [Y], **given}
    with pytest.raises(BadInput) as caught:
        export_module(build().eval(), out=tmp_path / "m.onnx", **specs)
    said = f"{caught.value.message} {caught.value.hint}"
    assert [word for word in words if word not in said] == []
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
