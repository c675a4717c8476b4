"""What NVIDIA's parser and builder answer, as our messages; the log lines come from real runs.

Nothing here needs TensorRT.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from deploykit.building.tensorrt import module
from deploykit.building.tensorrt.module import (
    Reason,
    build_refusal,
    error_of,
    parser_reasons,
    refuses_strong_typing,
)
from deploykit.core.errors import BadInput, Unsupported
from deploykit.engines.tensorrt.log import LogLines

NO_DRIVER = "[x.cpp::f::1] Error Code 1: Cuda Runtime (In f at x.cpp:2 (cudaError 35: no driver))"
CANNOT = (
    "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (Network must have at least "
    "one output In validate at /_src/optimizer/api/network.cpp:4023)"
)
PLUGIN = "NonZero plugin creator version 1 was not found in plugin registry."
TYPES = "IConvolutionLayer input and kernel must be of same type. input type is BFloat16 but "
FLOAT = "Assertion failed: (x->getType() == DataType::kFLOAT): Only FLOAT input is supported."
UNKNOWN = "UNSUPPORTED_NODE"


@pytest.mark.parametrize(
    ("code", "operator", "name", "desc", "says"),
    [
        (UNKNOWN, "Det", "det", "false", "operator Det 'det' is not supported by TensorRT"),
        (UNKNOWN, "Det", "", "false", "operator Det '#7' is not supported by TensorRT"),
        (UNKNOWN, "Elu", "n0", FLOAT, "by TensorRT: Only FLOAT input is supported"),
        (UNKNOWN, "NonZero", "nz", f"Assertion failed: creator: {PLUGIN}", "'nz' needs a plugin"),
        ("INVALID_NODE", "Conv", "c", TYPES + "kernel is of type Float.", "BFloat16 and Float"),
        ("INVALID_GRAPH", "", "", "Failed to import initializer: In node -1", "read: /m/w.data"),
    ],
)
def test_the_parsers_own_reason_is_shown(
    code: str, operator: str, name: str, desc: str, says: str
) -> None:
    """The operator may be supported, and its type not; a missing file is named from the log."""
    values = {"code": f"E.{code}", "node_operator": operator, "node_name": name, "node": 7}
    error = SimpleNamespace(**{key: partial(str, each) for key, each in values.items()})
    error.desc = lambda: desc
    parser: Any = SimpleNamespace(num_errors=1, get_error=lambda _number: error)
    lines = LogLines()
    lines.errors.append("WeightsContext.cpp:203: Failed to open file: /m/w.data")
    (found,) = parser_reasons(parser, lines)
    assert says in found.text
    assert found.damaged == code.startswith("INVALID")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([NO_DRIVER, CANNOT], "Network must have at least one output"),  # the driver is not it
        ([NO_DRIVER], "no NVIDIA driver on this machine"),
        ([], "no reason"),
        (["Tactic Selection: no tactics to implement within workspace limit."], "workspace"),
        (["Unable to load library: libnvinfer_lean.so.1: cannot open"], "lean runtime"),
        (["[a.cpp] Error Code 1: Cuda Runtime (out of memory)"], "out of memory"),
        (["Requested amount of GPU memory (5 bytes) could not be allocated"], "out of memory"),
        (["Compute capability is invalid or not supported"], "compute capability"),
    ],
)
def test_a_failed_build_has_an_explanation(lines: list[str], words: str) -> None:
    assert words in build_refusal(lines).text
    assert "network.cpp" not in build_refusal(lines).text


def test_every_refusal_is_in_the_one_line() -> None:
    error = error_of("m.onnx", [Reason("no Det", "hint"), Reason("no Unique")])
    assert isinstance(error, Unsupported)
    assert (error.message, error.hint) == ("m.onnx: no Det; no Unique", "hint")
    assert isinstance(error_of("m.onnx", [Reason("cut", damaged=True)]), BadInput)


@pytest.mark.parametrize(
    ("line", "blames"),
    [
        ("conv: could not find any supported formats consistent with input/output types", True),
        ("Strongly typed networks do not support this layer", True),
        ("kSTRONGLY_TYPED is not supported here", True),
        ("no tactics within workspace limit", False),
        ("must have same input types. But they are of types Half and Float", False),
    ],
)
def test_only_strong_typing_errors_count_as_such(line: str, blames: bool) -> None:
    assert refuses_strong_typing([NO_DRIVER, line]) is blames


@pytest.mark.parametrize(("text", "numbers"), [("10.3.0", (10, 3)), ("11.4.0.106", (11, 4))])
def test_a_version_is_read(text: str, numbers: tuple[int, int]) -> None:
    assert module.version(SimpleNamespace(__version__=text)) == numbers
