"""What the installed builder refuses, TensorRT or TensorRT for RTX, and its error messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.building.tensorrt import module
from deploykit.building.tensorrt.build import check
from deploykit.core.errors import BadInput, NotFound
from tests.support.builders.nvidia_cases import (
    BATCH,
    INT8,
    ask,
    checked,
    foreign,
    needs,
    options,
    quantized,
    raw,
)
from tests.support.onnx_zoo import linear, save


@ask
@needs
def test_all_unsupported_nodes_are_reported_in_one_pass(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["d"], name="det"),
        helper.make_node("Unique", ["x"], ["y"], name="uniq"),
    ]
    found = checked(raw(nodes), tmp_path)
    assert not found.accepted
    assert [problem.split()[1] for problem in found.problems] == ["Det", "Unique"]


@ask
@needs
def test_a_node_without_a_name_is_named_by_its_number(tmp_path: Path) -> None:
    found = checked(raw([helper.make_node("Det", ["x"], ["y"])]), tmp_path)
    assert "Det '#0'" in found.problems[0]


def _text() -> onnx.ModelProto:
    return raw([helper.make_node("Identity", ["x"], ["y"], name="id")], kind=TensorProto.STRING)


def _integer_operator() -> onnx.ModelProto:
    names = ["x", "s", "z", "w", "s", "z", "s", "z"]
    node = helper.make_node("QLinearMatMul", names, ["y"], name="qmm")
    weights = {
        "s": np.array(0.1, np.float32),
        "z": np.array(0, np.int8),
        "w": np.ones((4, 4), np.int8),
    }
    return raw([node], weights, kind=INT8)


@ask
@needs
@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (foreign, "Magic 'm' needs a plugin"),
        (_text, "a type that TensorRT does not support, such as string"),
        (_integer_operator, "QLinearMatMul 'qmm' is an integer operator of ONNX Runtime"),
        (
            lambda: quantized(np.array(0, np.int32), np.ones(4, np.int32)),
            "'bias_dq' dequantizes an int32 bias",
        ),
        (lambda: quantized(np.array(3, np.int8)), "zero point other than 0"),
        (
            lambda: quantized(np.array(128, np.uint8), np.ones(4, np.uint8)),
            "TensorRT supports symmetric INT8 only",
        ),
    ],
    ids=["foreign domain", "text", "QOperator", "int32 bias", "asymmetric", "uint8"],
)
def test_each_refusal_of_the_parser_is_explained(
    graph: Callable[[], onnx.ModelProto], words: str, tmp_path: Path
) -> None:
    found = checked(graph(), tmp_path)
    assert not found.accepted
    assert words in found.problems[0]


@ask
@needs
def test_types_that_disagree_are_bad_input(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], name="half", to=TensorProto.FLOAT16),
        helper.make_node("Div", ["h", "x"], ["y"], name="div"),
    ]
    with pytest.raises(BadInput, match="Div 'div' mixes the types Half and Float"):
        checked(raw(nodes), tmp_path)


@ask
@needs
def test_a_cut_file_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes(linear().SerializeToString()[:100])
    with pytest.raises(BadInput, match=r"cut\.onnx: is a truncated or damaged ONNX file"):
        check(path, options())


@ask
@needs
def test_an_empty_and_a_missing_file_are_not_given_to_the_parser(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(BadInput, match="the file is empty"):
        check(tmp_path / "empty.onnx", options())
    with pytest.raises(NotFound, match=r"none\.onnx"):
        check(tmp_path / "none.onnx", options())


@ask
@needs
def test_external_weights_are_read_and_missing_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save_model(linear(), path, save_as_external_data=True, size_threshold=0, location="m.data")
    assert check(path, options()).accepted
    (tmp_path / "m.data").unlink()
    with pytest.raises(BadInput, match=r"m\.data"):
        check(path, options())


@ask
@needs
def test_the_parser_itself_names_missing_weights(tmp_path: Path) -> None:
    """Ours asks before it; this is the message if they go missing in between."""
    nv = module.module()
    path = tmp_path / "m.onnx"
    onnx.save_model(linear(), path, save_as_external_data=True, size_threshold=0, location="m.data")
    (tmp_path / "m.data").unlink()
    builder = module.start(nv)
    network = builder.create_network(1 << int(nv.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = nv.OnnxParser(network, module.logger(nv))
    with module.collect_log(nv) as lines:
        assert not parser.parse_from_file(str(path))
    assert f"cannot be read: {tmp_path / 'm.data'}" in module.parser_reasons(parser, lines)[0].text


@ask
@needs
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (None, "no optimization profile has been defined"),
        (((8, 4), (4, 4), (2, 4)), "satisfy MIN<=OPT<=MAX"),
        (((1, 5), (2, 5), (4, 5)), "profile has min=5"),
        (((1, 4, 1), (1, 4, 1), (1, 4, 1)), "3 dimensions"),
    ],
    ids=["none", "out of order", "static axis differs", "rank differs"],
)
def test_errors_of_the_builder_are_found_before_it_runs(
    sizes: tuple[tuple[int, ...], ...] | None, words: str, tmp_path: Path
) -> None:
    nv = module.module()
    builder = module.start(nv)
    network = builder.create_network(1 << int(nv.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = nv.OnnxParser(network, module.logger(nv))
    assert parser.parse_from_file(str(save(linear(), tmp_path / "m.onnx")))
    config = builder.create_builder_config()
    with module.collect_log(nv) as lines:
        if sizes:
            profile = builder.create_optimization_profile()
            profile.set_shape("x", *sizes)
            config.add_optimization_profile(profile)
        assert builder.build_serialized_network(network, config) is None
    assert words in module.build_refusal(lines.errors).text


@ask
@needs
def test_contradictory_ranges_are_refused_before_the_build(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="`axes`: no input"):
        checked(linear(), tmp_path, axes={"T": BATCH})


@ask
@needs
def test_a_workspace_too_small_is_reported(tmp_path: Path) -> None:
    found = checked(linear(), tmp_path, workspace_bytes=1024)
    assert found.problems == ("no kernel fits into the workspace",)


@ask
@needs
def test_a_build_after_a_failed_one_reports_its_own_reason(tmp_path: Path) -> None:
    assert not checked(linear(), tmp_path, workspace_bytes=1024).accepted
    found = checked(foreign(), tmp_path)
    assert "plugin" in found.problems[0]
    assert checked(linear(), tmp_path).accepted
