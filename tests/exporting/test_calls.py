"""What a module's calls say of a failed export: the line, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

from deploykit.core.errors import BadInput, GateFailed  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.torch.files import module_errors  # noqa: E402
from deploykit.exporting.capture import ExportJob  # noqa: E402
from deploykit.exporting.onnx import add_cause, export_module  # noqa: E402
from deploykit.exporting.reasons import CallWatch, check_layers  # noqa: E402

pytestmark = pytest.mark.torch

X = parse_spec("x:float32[N,4]")


class Drops(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.3)


class Counts(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


class Draws(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(x, 1.0, validate_args=True).rsample()


class Normalizes(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize(
    ("module", "message", "hint"),
    [
        (Drops(), "the model draws random numbers at test_calls.py:", "training=self.training"),
        (Counts(), "the model changes its own 'calls' at test_calls.py:", "no state between calls"),
    ],
    ids=["random", "state"],
)
def test_a_graph_that_is_not_the_model_says_what_differs_from_call_to_call(
    module: torch.nn.Module, message: str, hint: str
) -> None:
    error = GateFailed("error 1 is above 0.1", hint="see the other rows")
    add_cause(error, ExportJob(module, [X], [], 20, {"N": 2}))
    assert message in error.message
    assert "in forward: `" in error.message
    assert hint in str(error.hint)


def test_arguments_that_a_distribution_checks_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"torch\.distributions checks its arguments") as caught:
        export_module(Draws(), [X], [parse_spec("y:float32[N,4]")], tmp_path / "m.onnx")
    line = "`return torch.distributions.Normal(x, 1.0, validate_args=True).rsample()`"
    assert line in caught.value.message
    assert "validate_args=False" in str(caught.value.hint)


def test_a_failure_in_a_module_names_its_line_and_the_rewrite() -> None:
    with pytest.raises(BadInput) as caught, module_errors("the model failed"):
        Normalizes()(torch.zeros(1, 4))
    assert "in forward: `return torch.nn.functional.batch_norm(" in caught.value.message
    assert "training=self.training" in str(caught.value.hint)


def test_a_parametrized_weight_is_to_be_kept_as_it_is() -> None:
    layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 4))
    error = BadInput("ONNX has no operator for aten.linalg_matrix_exp")
    CallWatch(torch.nn.Sequential(layer)).add_operator(error, "aten.linalg_matrix_exp")
    assert "remove_parametrizations(layer, 'weight')" in str(error.hint)


def test_quantized_layers_of_torch_are_named() -> None:
    error = BadInput("does not have a field with name '__obj_flatten__'")
    check_layers(error, torch.nn.Sequential(torch.ao.nn.quantized.FloatFunctional()))
    assert error.message.startswith("layer '0' is one of torch's quantized layers")
    assert "quantize --to int8" in str(error.hint)
