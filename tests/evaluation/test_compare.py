"""`compare` takes every kind of PyTorch file, with what says how to build it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, GateFailed

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.evaluation.compare import compare  # noqa: E402
from deploykit.exporting.export import export  # noqa: E402
from deploykit.quantization.quantize import quantize  # noqa: E402

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
    export(folder / "weights.pt", out=folder / "m.onnx", arch=arch, inputs=inputs)
    return folder


@pytest.mark.parametrize("name", ["weights.pt", "nested.pt"])
@pytest.mark.parametrize("turned", [False, True])
def test_bare_weights_are_compared_with_what_builds_them(
    folder: Path, name: str, turned: bool
) -> None:
    pair = (folder / name, folder / "m.onnx")[:: -1 if turned else 1]
    found = compare(*pair, arch=f"{folder}/net.py:Net")
    assert found.parity.passed
    assert (found.parity.a, found.parity.b) == tuple(path.name for path in pair)


def test_other_weights_of_the_same_network_do_not_pass(folder: Path) -> None:
    found = compare(folder / "other.pt", folder / "m.onnx", arch=f"{folder}/net.py:Net")
    with pytest.raises(GateFailed):
        found.raise_if_over()


def test_a_whole_program_is_compared_once_its_code_may_run(folder: Path) -> None:
    with pytest.raises(BadInput, match="may run code") as refused:
        compare(folder / "program.pt2", folder / "m.onnx")
    assert "`allow_pickle`" in str(refused.value.hint)
    assert compare(folder / "program.pt2", folder / "m.onnx", allow_pickle=True).parity.passed


@pytest.mark.parametrize(
    ("pair", "options", "why"),
    [
        (("weights.pt", "m.onnx"), {}, "does not say what the model is"),
        (("weights.pt", "weights.pt"), {"arch": "net"}, "says what its inputs are"),
        (("m.onnx", "m.onnx"), {"arch": "net"}, "is PyTorch's"),
        (("m.onnx", None), {"arch": "net"}, "need two files"),
        (("m.onnx", None), {"allow_pickle": True}, "need two files"),
        (("program.pt2", "m.onnx"), {"arch": "net", "allow_pickle": True}, "nothing to build"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(
    folder: Path, pair: tuple[str, str | None], options: dict[str, object], why: str
) -> None:
    given = dict(options)
    if "arch" in given:
        given["arch"] = f"{folder}/net.py:Net"
    second = folder / pair[1] if pair[1] else None
    with pytest.raises(BadInput, match=why):
        compare(folder / pair[0], second, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def int8(folder: Path) -> Path:
    """INT8 of the network for inputs of 100 times the usual size."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    inputs = 100 * np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    np.savez(folder / "calib.npz", x=inputs)
    return quantize(folder / "m.onnx", "int8", calib=folder / "calib.npz").path


def test_int8_is_compared_on_its_golden_samples_with_their_bound(folder: Path, int8: Path) -> None:
    found = compare(folder / "m.onnx", int8)
    assert "golden samples of m.int8.onnx" in found.note
    assert found.parity.max_error > 1e-3
    found.raise_if_over()


def test_int8_without_golden_samples_says_that_real_inputs_are_needed(
    folder: Path, int8: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.onnx"
    bare.write_bytes(int8.read_bytes())
    found = compare(folder / "m.onnx", bare)
    with pytest.raises(GateFailed) as over:
        found.raise_if_over()
    assert "random inputs are not what bare.onnx was calibrated for" in str(over.value.hint)
    assert "`data`" in str(over.value.hint)
    compare(folder / "m.onnx", bare, data=folder / "calib.npz", max_error=0.3).raise_if_over()
