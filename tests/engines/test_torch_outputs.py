"""Names, types and axes of what a module returns, and how inputs reach it."""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.data.examples import Example  # noqa: E402
from deploykit.engines.torch.loaded import Loaded  # noqa: E402
from deploykit.engines.torch.open import load_module  # noqa: E402
from deploykit.engines.torch.outputs import (  # noqa: E402
    adapt,
    binding,
    describe,
    flatten_outputs,
    output_names,
)

pytestmark = pytest.mark.torch


class Boxes(NamedTuple):
    boxes: Any
    scores: Any


@dataclasses.dataclass
class Answer:
    logits: Any
    hidden: Any = None


class ModelOutput(OrderedDict[str, Any]):
    """As transformers': a dict that holds only what is not None."""


class Function(torch.nn.Module):
    """A module that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def specs(function: Callable[..., Any], *inputs: str) -> list[str]:
    """The outputs' specs, as text, of a function of these inputs."""
    wanted = [parse_spec(text) for text in inputs]
    module = Function(function)
    adapter = adapt(module, binding(module, [spec.name for spec in wanted])[0], len(wanted))
    return [str(spec) for spec in describe("m", adapter, wanted, Example()).outputs]


T = torch.zeros(1)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (T, ["output"]),
        ([T], ["output"]),
        ((T, None, T), ["output_0", "output_2"]),
        ({"logits": T, "aux": T}, ["logits", "aux"]),
        ({"only": T}, ["only"]),
        (Boxes(T, T), ["boxes", "scores"]),
        (torch.max(torch.zeros(2, 2), 1), ["values", "indices"]),
        (Answer(T), ["logits"]),
        (Answer(T, (T, T)), ["logits", "hidden_0", "hidden_1"]),
        (ModelOutput(logits=T, states=(T,)), ["logits", "states_0"]),
        ({"a": {"b": [T, {"c": T}]}}, ["a_b_0", "a_b_1_c"]),
        ([Boxes(T, T), T], ["output_0_boxes", "output_0_scores", "output_1"]),
        ({0: T, "1": T}, ["output_0", "output_1"]),
        ({"a b/c": T, "": T, "é": T}, ["a_b_c", "output", "output_2"]),
        ({"a_b": T, "a": {"b": T}}, ["a_b", "a_b_2"]),
        ({"x": T, "y": T}, ["x_2", "y"]),
    ],
)
def test_outputs_are_named_by_keys_fields_and_places(value: Any, names: list[str]) -> None:
    places = [place for place, _ in flatten_outputs(value)]
    assert output_names(places, taken={"x"}) == names


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "output is a str"),
        ((T, 3), r"output '1' is a int"),
        ({"cache": {"keys": [T, object()]}}, r"output 'cache\.keys\.1' is a object"),
        ({"sparse": torch.eye(2).to_sparse()}, "output 'sparse' is a Tensor"),
    ],
    ids=["text", "number", "nested", "sparse"],
)
def test_an_output_that_is_not_a_tensor_is_named_with_its_position(
    value: Any, message: str
) -> None:
    with pytest.raises(BadInput, match=f"the model's {message}"):
        specs(lambda _: value, "x:float32[N]")


def test_a_model_that_returns_nothing_is_bad_input() -> None:
    with pytest.raises(BadInput, match="returns no tensor"):
        specs(lambda _: {"a": None}, "x:float32[N]")


def test_a_type_without_a_name_here_is_bad_input() -> None:
    with pytest.raises(BadInput, match="output: unknown dtype 'complex64'"):
        specs(lambda x: x.to(torch.complex64), "x:float32[N]")


# --- axes ---


@pytest.mark.parametrize(
    ("function", "inputs", "outputs"),
    [
        (lambda x: x.sum(), ["x:float32[N,4]"], ["output:float32[]"]),
        (lambda x: x @ x.mT, ["x:float32[N,4]"], ["output:float32[N,N]"]),
        (
            lambda x, i: (x[:, 0], i * 2),
            ["x:float32[N,4]", "i:int64[N,T]"],
            ["output_0:float32[N]", "output_1:int64[N,T]"],
        ),
        (lambda i: i.transpose(0, 1), ["i:int64[N,T]"], ["output:int64[T,N]"]),
        (lambda i: i.reshape(-1), ["i:int64[N,T]"], ["output:int64[output_0]"]),
        (lambda i: i[:, 1:], ["i:int64[N,T]"], ["output:int64[N,output_1]"]),
        (lambda i: i[:, :2], ["i:int64[N,T]"], ["output:int64[N,2]"]),
        (
            lambda a, b: torch.cat([a, b], 1),
            ["a:float32[N,T]", "b:float32[N,U]"],
            ["output:float32[N,output_1]"],
        ),
        (lambda x: x.nonzero(), ["x:float32[N,4]"], ["output:int64[output_0,2]"]),
        (lambda x: x > 0, ["x:float16[2,3]"], ["output:bool[2,3]"]),
        (lambda h: h, ["h:float32[1,N,8]"], ["output:float32[1,N,8]"]),
    ],
    ids=[
        "scalar",
        "square",
        "two",
        "swapped",
        "merged",
        "shorter",
        "cut",
        "joined",
        "data",
        "fixed",
        "batch-second",
    ],
)
def test_output_axes_follow_the_inputs_axes(
    function: Callable[..., Any], inputs: list[str], outputs: list[str]
) -> None:
    assert specs(function, *inputs) == outputs


def test_an_axis_divided_by_a_stride_of_32_is_dynamic() -> None:
    """At small sizes it would be 1 both times and look fixed."""
    pool = torch.nn.MaxPool2d(32, ceil_mode=True)
    outputs = specs(pool, "x:float32[N,3,H,W]")
    assert outputs == ["output:float32[N,3,output_2,output_3]"]


def test_a_stride_of_8_along_a_sequence_is_dynamic() -> None:
    pool = torch.nn.MaxPool1d(8, ceil_mode=True)
    assert specs(pool, "x:float32[N,3,T]") == ["output:float32[N,3,output_2]"]


def test_larger_sizes_are_tried_where_small_ones_fail() -> None:
    convolution = torch.nn.Conv1d(1, 2, 400, stride=320)
    assert specs(convolution, "x:float32[N,1,S]") == ["output:float32[N,2,output_2]"]


def test_a_length_limit_of_20_is_kept() -> None:
    table = torch.zeros(20, 4)
    assert specs(lambda i: table[torch.arange(i.shape[1])] + i[..., None], "i:int64[N,T]") == [
        "output:float32[N,T,4]"
    ]


def test_integer_inputs_that_must_not_be_zero_are_tried_as_one() -> None:
    lstm = torch.nn.LSTM(4, 3, batch_first=True)

    def run(x: Any, lengths: Any) -> Any:
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return lstm(packed)[1][0]

    assert specs(run, "x:float32[N,T,4]", "lengths:int64[N]") == ["output:float32[1,N,3]"]


def test_inputs_that_the_model_does_not_take_are_named_with_the_reason() -> None:
    with pytest.raises(
        BadInput, match=r"does not take x:float32\[N,5\] .*N=2\): RuntimeError: .*mat1"
    ):
        specs(torch.nn.Linear(4, 2), "x:float32[N,5]")


def test_an_image_model_is_probed_at_image_sizes() -> None:
    """At small ones it would fail for a reason that is not the user's: a kernel too large."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 2, 11, stride=4), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    )
    with pytest.raises(BadInput, match=r"tried N=2, H=64, W=96\): RuntimeError: .*mat1 and mat2"):
        specs(network, "x:float32[N,3,H,W]")


def test_an_axis_that_is_fixed_in_the_model_is_named() -> None:
    with pytest.raises(BadInput, match=r"axis N is not dynamic in this model.*size of 2") as caught:
        specs(lambda x: x.reshape(2, 4), "x:float32[N,4]")
    assert "fixed size" in str(caught.value.hint)


def test_an_exception_of_the_users_own_class_is_bad_input() -> None:
    class OddError(Exception):
        pass

    def run(x: Any) -> Any:
        raise OddError("first\nsecond")

    with pytest.raises(BadInput, match=r"OddError: first$"):
        specs(run, "x:float32[N]")


# --- inputs ---

ARCH = """
import torch
class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
class Named(Base):
    def forward(self, ids, mask=None, *, scale):
        return {"ids": ids * 1, "masked": mask & True, "scaled": scale * 2}
class Placed(Base):
    def forward(self, input_ids, attention_mask):
        return input_ids * 2, attention_mask * 3
class Config:
    use_cache = True
class Cached(Base):
    def __init__(self):
        super().__init__()
        self.linear.config = Config()
    def forward(self, x):
        return {"y": self.linear(x), "past": object() if self.linear.config.use_cache else None}
"""


def loaded(folder: Path, name: str, *inputs: str) -> Loaded:
    (folder / "arch.py").write_text(ARCH, encoding="utf-8")
    weights = {f"linear.{k}": v for k, v in torch.nn.Linear(4, 4).state_dict().items()}
    torch.save(weights, folder / "m.pt")
    arch = f"{folder}/arch.py:{name}"
    return load_module(folder / "m.pt", arch=arch, inputs=[parse_spec(text) for text in inputs])


def test_inputs_named_as_forwards_parameters_go_in_by_keyword(tmp_path: Path) -> None:
    """In any order, and to keyword-only parameters."""
    found = loaded(tmp_path, "Named", "scale:float32[N]", "mask:bool[N,T]", "ids:int64[N,T]")
    assert [str(spec) for spec in found.outputs] == [
        "ids_2:int64[N,T]",
        "masked:bool[N,T]",
        "scaled:float32[N]",
    ]
    ids = torch.full((2, 3), 7)
    answers = found.module(torch.ones(2), torch.ones(2, 3, dtype=torch.bool), ids)
    assert torch.equal(answers[0], ids)
    assert found.notes == ()


def test_inputs_of_other_names_go_in_by_position(tmp_path: Path) -> None:
    found = loaded(tmp_path, "Placed", "a:int64[N,T]", "b:int64[N,T]")
    first, second = found.module(torch.ones(1, 1), torch.ones(1, 1))
    assert (first.item(), second.item()) == (2, 3)
    assert found.notes == ()


def test_names_that_match_in_part_go_in_by_position_with_a_note(tmp_path: Path) -> None:
    found = loaded(tmp_path, "Placed", "attention_mask:int64[N,T]", "ids:int64[N,T]")
    assert found.notes == (
        "inputs go in by position: attention_mask, ids as input_ids, attention_mask",
    )


def test_an_argument_that_no_input_fills_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"missing 1 required .*argument: 'attention_mask'"):
        loaded(tmp_path, "Placed", "input_ids:int64[N,T]")


def test_a_cache_for_generation_is_switched_off_with_a_note(tmp_path: Path) -> None:
    found = loaded(tmp_path, "Cached", "x:float32[N,4]")
    assert [str(spec) for spec in found.outputs] == ["y:float32[N,4]"]
    assert found.notes == ("switched use_cache off in the model's config",)


def test_exporters_see_one_parameter_for_each_input(tmp_path: Path) -> None:
    found = loaded(tmp_path, "Placed", "a:int64[N,T]", "b:int64[N,T]")
    assert list(inspect.signature(found.module.forward).parameters) == ["input_0", "input_1"]
    sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("T")}
    ids = torch.ones(3, 5, dtype=torch.int64)
    program = torch.export.export(found.module, (ids, ids), dynamic_shapes=(sizes, sizes))
    assert program.module()(ids[:2], ids[:2])[0].shape == (2, 5)


@pytest.mark.parametrize(
    ("specs", "hint"),
    [
        (["x:float32[N,4]", "y:float32[N,4]"], "the model's forward takes: x"),
        (["x:float32[3]"], "its batch axis is missing: 'x:float32[N,3]'"),
        (["x:float32[N,3]"], None),
    ],
)
def test_a_model_that_does_not_take_its_inputs_says_what_may_be_wrong(
    specs: list[str], hint: str | None
) -> None:
    class Takes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1, 4)

    module, inputs = Takes(), [parse_spec(text) for text in specs]
    adapter = adapt(module, binding(module, [spec.name for spec in inputs])[0], len(inputs))
    with pytest.raises(BadInput, match="the model does not take") as caught:
        describe("m", adapter, inputs, Example())
    assert (hint in str(caught.value.hint)) if hint else caught.value.hint is None


def test_steps_in_front_of_the_batch_have_a_least_size() -> None:
    inputs = [parse_spec("x:float32[T,N,4]")]
    module = Function(lambda x: x.unfold(0, 3, 1))
    adapter = adapt(module, binding(module, ["x"])[0], 1)
    assert describe("m", adapter, inputs, Example()).limits == {"T": (3, None)}
