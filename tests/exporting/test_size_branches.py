"""Causal decoders whose Python code decides by a size: exported, or the line and a cure named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")

from deploykit.core.errors import BadInput, GateFailed  # noqa: E402
from deploykit.exporting import onnx as exporter  # noqa: E402
from deploykit.exporting.export import export  # noqa: E402
from deploykit.exporting.reasons import CallWatch, SizeWatch, _always, explain  # noqa: E402
from tests.support.campaign import only_in_a_campaign  # noqa: E402

pytestmark = pytest.mark.torch


class Decoder(torch.nn.Module):
    """One block of causal attention over a table of positions, as nanoGPT has it."""

    def __init__(self, branch: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branch = branch
        self.token, self.place = torch.nn.Embedding(16, 4), torch.nn.Embedding(300, 4)
        self.register_buffer("visible", torch.tril(torch.ones(300, 300)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
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
        if self.branch == "odd" and length % 2:
            x = x + 1
        values: torch.Tensor = x
        return values


def exported(branch: str, out: Path) -> list[str]:
    made = export(Decoder(branch), inputs=["ids:int64[N,T]"], out=out)
    return [note for note in made.notes if "sizes" in note]


def test_a_branch_that_holds_for_every_length_is_exported_without_a_word(tmp_path: Path) -> None:
    assert exported("none", tmp_path / "m.onnx") == []


def test_a_check_of_the_length_is_exported_and_reported(tmp_path: Path) -> None:
    (note,) = exported("check", tmp_path / "m.onnx")
    assert "for sizes with T <= 300 (test_size_branches.py:" in note
    assert 'if self.branch == "check" and length > 300:' in note


@pytest.mark.parametrize(
    ("branch", "code"),
    [("short", 'if self.branch == "short" and'), ("odd", 'if self.branch == "odd" and')],
)
def test_a_branch_by_the_length_is_refused_with_its_line_and_the_cure(
    tmp_path: Path, branch: str, code: str
) -> None:
    with pytest.raises((BadInput, GateFailed)) as caught:
        exported(branch, tmp_path / "m.onnx")
    assert "test_size_branches.py:" in caught.value.message
    assert code in caught.value.message
    assert "torch.where" in str(caught.value.hint)
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    ("guard", "always"),
    [
        ("s5 > 1", True),
        ("2 <= s5", True),
        ("Ne(s5, 1)", True),
        ("s5 <= 31", False),
        ("Ne(Mod(s5, 2), 0)", False),
        ("Eq(FloorDiv(s5, 2)*2, s5)", False),
        ("Max(1, s5) >= 1", True),
        ("Unheard(s5)", False),
        ("__import__('os')", False),
    ],
)
def test_what_holds_for_every_size_is_no_decision(guard: str, always: bool) -> None:
    assert _always(guard, {"s5": 3}) is always


def test_a_decision_is_written_in_the_names_of_the_axes() -> None:
    watch = SizeWatch()
    watch.symbols = {"s5": 3, "s77": 2}
    watch.guards = {"s5 <= 31": "a.py:1", "s77 > 1": "a.py:2", "s5 < s77": "a.py:1"}
    (decision,) = watch.decisions({"N": 2, "T": 3})
    assert str(decision) == "T <= 31 (a.py:1)"


def split(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([part * at for at, part in enumerate(x.split(2, dim=1))], 1)


def chunks(x: torch.Tensor) -> torch.Tensor:
    parts = x.chunk((x.shape[1] + 1) // 2, dim=1)
    return torch.stack([part.mean(1) for part in parts], 1)


def rounds(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:, at : at + 2].sum(1) for at in range(0, x.shape[1], 2)], 1)


class Cut(torch.nn.Module):
    def __init__(self, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(x)


def thirds(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum(1) for part in torch.tensor_split(x, 3, dim=1)], 1)


def twice(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2 * x.shape[1]):
        x = torch.tanh(x + 1)
    return x


@pytest.mark.parametrize(
    ("cut", "code"),
    [
        (split, "x.split(2, dim=1)"),
        (chunks, "x.chunk("),
        pytest.param(rounds, "range(0, x.shape[1], 2)", marks=only_in_a_campaign),
        pytest.param(thirds, "torch.tensor_split(x, 3, dim=1)", marks=only_in_a_campaign),
        (twice, "range(2 * x.shape[1])"),
    ],
)
def test_pieces_that_follow_the_length_are_refused_with_their_line_and_the_cure(
    tmp_path: Path, cut: Callable[[torch.Tensor], torch.Tensor], code: str
) -> None:
    with pytest.raises((BadInput, GateFailed)) as caught:
        export(Cut(cut), inputs=["x:float32[N,T]"], out=tmp_path / "m.onnx")
    assert "axis N" not in caught.value.message
    assert "test_size_branches.py:" in caught.value.message
    assert f"in {cut.__name__}: `" in caught.value.message
    assert code in caught.value.message
    assert "x.unflatten(dim, (-1, length))" in str(caught.value.hint)


def pooled(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.max_pool1d(x.unsqueeze(1), x.shape[1]).flatten(1)


def test_a_window_of_pooling_that_follows_the_length_is_refused_with_its_rewrite(
    tmp_path: Path,
) -> None:
    with pytest.raises(BadInput, match=r"in pooled: `return torch.nn.functional.max_pool1d") as e:
        export(Cut(pooled), inputs=["x:float32[N,T]"], out=tmp_path / "m.onnx")
    assert "x.amax(dim)" in str(e.value.hint)


class Quantized(torch.nn.Linear):
    """Trained with fake quantization, whose scales it computes."""

    def __init__(self, by_len: bool) -> None:
        super().__init__(4, 3)
        self.by_len = by_len

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = self.weight.detach().abs().amax(1) / 127
        rows = len(scales) if self.by_len else scales.shape[0]
        zeros = torch.zeros(rows, dtype=torch.int32)
        w = torch.fake_quantize_per_channel_affine(self.weight, scales, zeros, 0, -128, 127)
        x = torch.fake_quantize_per_tensor_affine(x, 1 / 127, 0, -128, 127)
        return torch.nn.functional.linear(x, w, self.bias)


def test_fake_quantization_is_kept_or_refused_with_its_rewrite(tmp_path: Path) -> None:
    x, out = torch.rand(2, 4), tmp_path / "m.onnx"
    with pytest.raises(BadInput, match=r"keep one branch at .*len\(scales\)") as caught:
        export(Quantized(by_len=True).eval(), x, out=out)
    assert "x.shape[0], not len(x)" in str(caught.value.hint)
    export(Quantized(by_len=False).eval(), x, out=out)
    operators = [node.op_type for node in onnx.load(out).graph.node]
    assert operators.count("DequantizeLinear") == 2


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, x.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)


def test_pieces_as_an_axis_are_exported(tmp_path: Path) -> None:
    """The cure that the refusal names, and the same answers."""
    x = torch.arange(10.0).reshape(2, 5)
    assert torch.equal(padded(x), rounds(x))
    made = export(Cut(padded), inputs=["x:float32[N,T]"], out=tmp_path / "m.onnx")
    assert made.manifest.evidence.parity is not None
    assert made.manifest.evidence.parity.passed
    assert not [note for note in made.notes if "sizes" in note]


def test_an_inequality_of_sizes_that_torch_cannot_solve_is_no_last_word() -> None:
    """As SEW-D's: with torch's own names for the axes it is traced."""
    error = explain(AssertionError("Expected op to be '==', got <= for T // 2 <= 4"), [], {})
    assert error.fixed
    assert "Expected op" in error.message


def test_a_type_that_torch_wrote_wrongly_is_not_called_a_sizes_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "watch_calls", lambda _: CallWatch(torch.nn.Identity()))
    job: Any = SimpleNamespace(suspects=["", "a.py:1"])
    wrong, cut = BadInput("[TypeInferenceError] (11) vs (1)"), BadInput("got 3, expected 2")
    for error in (wrong, cut):
        exporter.add_cause(error, job)
    assert wrong.message == "[TypeInferenceError] (11) vs (1)"
    assert cut.message == "got 3, expected 2; a size decides at a.py:1"
