"""Names, types and axes of what a module returns, and how inputs reach it."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import parse_spec  # noqa: E402
from deploykit.engines.data.examples import Example  # noqa: E402
from deploykit.engines.torch.files import absent, module_errors  # noqa: E402
from deploykit.engines.torch.loaded import Loaded, load_live  # noqa: E402
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
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def described(module: Any, *inputs: str) -> Loaded:
    wanted = [parse_spec(text) for text in inputs]
    adapter = adapt(module, binding(module, [spec.name for spec in wanted])[0], len(wanted))
    return describe("m", adapter, wanted, Example())


def outputs(function: Callable[..., Any], *inputs: str) -> list[str]:
    return [str(spec) for spec in described(Function(function), *inputs).outputs]


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
        ("text", "the model's output is a str"),
        ((T, 3), "the model's output '1' is a int"),
        ({"cache": {"keys": [T, object()]}}, r"the model's output 'cache\.keys\.1' is a object"),
        ({"sparse": torch.eye(2).to_sparse()}, "the model's output 'sparse' is a Tensor"),
        ({"a": None}, "returns no tensor"),
        (T.to(torch.complex64), "output: unknown dtype 'complex64'"),
    ],
    ids=["text", "number", "nested", "sparse", "none", "complex"],
)
def test_what_is_no_output_is_named_with_its_position(value: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        outputs(lambda _: value, "x:float32[N]")


# --- axes ---


TABLE = torch.zeros(20, 4)
AXES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "scalar": (lambda x: x.sum(), "x:float32[N,4]", "output:float32[]"),
    "square": (lambda x: x @ x.mT, "x:float32[N,4]", "output:float32[N,N]"),
    "two": (
        lambda x, i: (x[:, 0], i * 2),
        "x:float32[N,4] i:int64[N,T]",
        "output_0:float32[N] output_1:int64[N,T]",
    ),
    "swapped": (lambda i: i.transpose(0, 1), "i:int64[N,T]", "output:int64[T,N]"),
    "merged": (lambda i: i.reshape(-1), "i:int64[N,T]", "output:int64[output_0]"),
    "shorter": (lambda i: i[:, 1:], "i:int64[N,T]", "output:int64[N,output_1]"),
    "cut": (lambda i: i[:, :2], "i:int64[N,T]", "output:int64[N,2]"),
    "data": (lambda x: x.nonzero(), "x:float32[N,4]", "output:int64[output_0,2]"),
    "data, and a fixed batch": (
        lambda x: torch.cat([x, torch.ones(1, 4)])[torch.cat([x, torch.ones(1, 4)])[:, 0] > 0.5],
        "x:float32[30,4]",
        "output:float32[output_0,4]",
    ),
    "fixed": (lambda x: x > 0, "x:float16[2,3]", "output:bool[2,3]"),
    "batch second": (lambda h: h, "h:float32[1,N,8]", "output:float32[1,N,8]"),
    "a stride of 32": (  # at small sizes it would be 1 both times and look fixed
        torch.nn.MaxPool2d(32, ceil_mode=True),
        "x:float32[N,3,H,W]",
        "output:float32[N,3,output_2,output_3]",
    ),
    "larger sizes": (
        torch.nn.Conv1d(1, 2, 400, stride=320),
        "x:float32[N,1,S]",
        "output:float32[N,2,output_2]",
    ),
    "a limit of 20": (
        lambda i: TABLE[torch.arange(i.shape[1])] + i[..., None],
        "i:int64[N,T]",
        "output:float32[N,T,4]",
    ),
}


@pytest.mark.parametrize("case", AXES)
def test_output_axes_follow_the_inputs_axes(case: str) -> None:
    function, inputs, found = AXES[case]
    assert outputs(function, *inputs.split()) == found.split()


def test_steps_in_front_of_the_batch_have_a_least_size() -> None:
    module = Function(lambda x: x.unfold(0, 3, 1))
    assert described(module, "x:float32[T,N,4]").limits == {"T": (3, None)}


def test_integer_inputs_that_must_not_be_zero_are_tried_as_one() -> None:
    lstm = torch.nn.LSTM(4, 3, batch_first=True)

    def run(x: Any, lengths: Any) -> Any:
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return lstm(packed)[1][0]

    assert outputs(run, "x:float32[N,T,4]", "lengths:int64[N]") == ["output:float32[1,N,3]"]


class OddError(Exception):
    pass


def fails(_: Any) -> Any:
    raise OddError("first\nsecond")


class Takes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 4)


class TakesTwo(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + mask


NO = "the model does not take"
REFUSED: dict[str, tuple[torch.nn.Module, str, str]] = {
    "a shape": (
        torch.nn.Linear(4, 2),
        "x:float32[N,5]",
        r"does not take x:float32\[N,5\] .*N=2\): RuntimeError: .*mat1",
    ),
    "a fixed axis": (
        Function(lambda x: x.reshape(2, 4)),
        "x:float32[N,4]",
        "axis N is not dynamic in this model.*size of 2.*fixed size",
    ),
    "an error of the user's own": (Function(fails), "x:float32[N]", "OddError: first "),
    "one more": (Takes(), "x:float32[N,4] y:float32[N,4]", f"{NO}.*forward takes: x"),
    "one less": (TakesTwo(), "x:int64[N,4]", "missing 1 required .*argument: 'mask'"),
    "no batch": (Takes(), "x:float32[3]", f"{NO}.*batch axis is missing: 'x:float32.N,3.'"),
    "nothing to advise": (Takes(), "x:float32[N,3]", f"{NO}.* None$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_does_not_take_its_inputs_says_what_may_be_wrong(case: str) -> None:
    module, inputs, reason = REFUSED[case]
    with pytest.raises(BadInput) as caught:
        described(module, *inputs.split())
    assert re.search(reason, f"{caught.value.message} {caught.value.hint}")


# --- inputs ---


class Named(torch.nn.Module):
    def forward(self, ids: Any, mask: Any = None, *, scale: Any) -> Any:
        return {"ids": ids * 1, "masked": mask & True, "scaled": scale * 2}


class Placed(torch.nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return input_ids * 2, attention_mask * 3


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.linear.config = SimpleNamespace(use_cache=True)

    def forward(self, x: Any) -> Any:
        return {"y": self.linear(x), "past": object() if self.linear.config.use_cache else None}


def loaded(kind: type[torch.nn.Module], *inputs: str) -> Loaded:
    return load_live(kind(), [parse_spec(text) for text in inputs])


def test_inputs_named_as_forwards_parameters_go_in_by_keyword() -> None:
    found = loaded(Named, "scale:float32[N]", "mask:bool[N,T]", "ids:int64[N,T]")
    assert [str(spec) for spec in found.outputs] == [
        "ids_2:int64[N,T]",
        "masked:bool[N,T]",
        "scaled:float32[N]",
    ]
    ids = torch.full((2, 3), 7)
    answers = found.module(torch.ones(2), torch.ones(2, 3, dtype=torch.bool), ids)
    assert torch.equal(answers[0], ids)
    assert found.notes == ()


def test_inputs_of_other_names_go_in_by_position() -> None:
    found = loaded(Placed, "a:int64[N,T]", "b:int64[N,T]")
    first, second = found.module(torch.ones(1, 1), torch.ones(1, 1))
    assert (first.item(), second.item()) == (2, 3)
    assert found.notes == ()
    assert list(inspect.signature(found.module.forward).parameters) == ["input_0", "input_1"]
    found = loaded(Placed, "attention_mask:int64[N,T]", "ids:int64[N,T]")
    assert found.notes == (
        "inputs go in by position: attention_mask, ids as input_ids, attention_mask",
    )


def test_a_cache_for_generation_is_switched_off_with_a_note() -> None:
    found = loaded(Cached, "x:float32[N,4]")
    assert [str(spec) for spec in found.outputs] == ["y:float32[N,4]"]
    assert found.notes == ("switched use_cache off in the model's config",)


# --- operators of libraries that are not here ---

SAID = {
    "operator torchvision::nms does not exist": "torchvision::nms",
    "Unknown builtin op: torchvision::nms.\nCould not find any": "torchvision::nms",
    "Could not run 'mine::op' with arguments from the 'CPU' backend": "mine::op",
    "Couldn't load custom C++ ops. This can happen if": "torchvision::nms",
    "mat1 and mat2 shapes cannot be multiplied": None,
}


@pytest.mark.parametrize("said", SAID)
def test_an_absent_operator_is_read_off_what_torch_says(said: str) -> None:
    outer = ValueError("cannot load")
    outer.__cause__ = RuntimeError(said)
    assert absent(RuntimeError(said)) == absent(outer) == SAID[said]


class Asks:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise RuntimeError('operator mine::op does not exist')",)


def test_a_file_or_model_that_lacks_an_operator_names_it(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(pickle.dumps(Asks()))
    says = r"m\.pt: needs the operator mine::op of the library mine"
    with pytest.raises(BadInput, match=says) as caught:
        load_module(tmp_path / "m.pt", inputs=[parse_spec("x:float32[N,3]")], allow_pickle=True)
    assert "install mine" in str(caught.value.hint)
    library = torch.library.Library("deploykit_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    module = Function(lambda x: torch.ops.deploykit_test.twice(x))
    with pytest.raises(BadInput, match="the operator deploykit_test::twice of the library"):
        described(module, "x:float32[N,3]")
    with pytest.raises(BadInput, match="the operator deploykit_test::twice"), module_errors("m"):
        module(torch.zeros(1, 3))
