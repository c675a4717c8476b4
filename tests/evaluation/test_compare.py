"""`compare` takes every kind of PyTorch file, with what says how to build it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.errors import BadInput, GateFailed

torch = pytest.importorskip("torch", reason="torch is not installed")

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One network in every form: net.py, its weights, whole programs and the ONNX graph."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "net.py").write_text(NET)
    space: dict[str, type[torch.nn.Module]] = {}
    exec(NET, space)
    torch.manual_seed(0)
    net = space["Net"]().eval()
    torch.save(net.state_dict(), folder / "weights.pt")
    torch.save({"epoch": 3, "model": net.state_dict()}, folder / "nested.pt")
    torch.save({name: 2 * each for name, each in net.state_dict().items()}, folder / "other.pt")
    axes = ({0: torch.export.Dim("N")},)
    program = torch.export.export(net, (torch.zeros(2, 8),), dynamic_shapes=axes)
    torch.export.save(program, folder / "program.pt2")
    arch, inputs = f"{folder}/net.py:Net", ("x:float32[N,8]",)
    dk.export(folder / "weights.pt", out=folder / "m.onnx", arch=arch, inputs=inputs)
    return folder


@pytest.mark.parametrize("name", ["weights.pt", "nested.pt"])
@pytest.mark.parametrize("turned", [False, True])
def test_weights_are_compared_with_what_builds_them(folder: Path, name: str, turned: bool) -> None:
    pair = (folder / name, folder / "m.onnx")[:: -1 if turned else 1]
    parity = dk.compare(*pair, arch=f"{folder}/net.py:Net").parity
    assert (parity.passed, parity.a, parity.b) == (True, *(path.name for path in pair))
    other = dk.compare(folder / "other.pt", folder / "m.onnx", arch=f"{folder}/net.py:Net")
    with pytest.raises(GateFailed):
        other.raise_if_over()


def test_a_whole_program_is_compared_once_its_code_may_run(folder: Path) -> None:
    with pytest.raises(BadInput, match="may run code") as refused:
        dk.compare(folder / "program.pt2", folder / "m.onnx")
    assert "`allow_pickle`" in refused.value.hint
    assert dk.compare(folder / "program.pt2", folder / "m.onnx", allow_pickle=True).parity.passed


@pytest.mark.parametrize(
    ("pair", "options", "why"),
    [
        (("weights.pt", "m.onnx"), {}, "does not say what the model is"),
        (("weights.pt", "weights.pt"), {"arch": "net"}, "says what its inputs are"),
        (("m.onnx", "m.onnx"), {"arch": "net"}, "is PyTorch's"),
        (("m.onnx",), {"arch": "net"}, "need two files"),
        (("m.onnx",), {"allow_pickle": True}, "need two files"),
        (("program.pt2", "m.onnx"), {"arch": "net", "allow_pickle": True}, "nothing to build"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(
    folder: Path, pair: tuple[str, ...], options: dict[str, object], why: str
) -> None:
    arch = {"arch": f"{folder}/net.py:Net"} if "arch" in options else {}
    with pytest.raises(BadInput, match=why):
        dk.compare(*(folder / name for name in pair), **{**options, **arch})


def test_int8_is_compared_on_golden_samples_or_needs_inputs(folder: Path, tmp_path: Path) -> None:
    """Of inputs of 100 times the usual size."""
    calib, model = tmp_path / "calib.npz", folder / "m.onnx"
    np.savez(calib, x=100 * np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
    int8 = dk.quantize(model, "int8", tmp_path / "q.onnx", calib=calib)
    bare = tmp_path / "bare.onnx"
    found = dk.compare(model, int8.path)
    assert "golden samples of q.onnx" in found.note
    assert found.parity.max_error > 1e-3
    found.raise_if_over()
    bare.write_bytes(int8.path.read_bytes())
    with pytest.raises(GateFailed) as over:
        dk.compare(model, bare).raise_if_over()
    assert "random inputs are not what bare.onnx was calibrated for" in over.value.hint
    assert "`data`" in over.value.hint
    dk.compare(model, bare, data=calib, max_error=0.3).raise_if_over()
