"""ONNX files that are good, or nearly, and every verb on them: for a process that may be ended.

    python -m scripts.fuzz_models FOLDER SEED ROUNDS

Prints each input before it is tried, and BUG lines: errors that the command line would call a bug.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import deploykit as dk
from deploykit.core.errors import DeploykitError

_OPSETS = [helper.make_opsetid("", 18)]
_NUMBERS = (0, 1, -1, 2, 7, 16, 255, 1 << 20, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63))
_TEXTS = (
    *("", "x", "y", "w", "N", "If", "Loop", "Cast", "Conv", "Nope", "ai.onnx", "com.microsoft"),
    *("\x1b[2J", "ü", "a/b", "..", "long" * 200, "0", "-1", "location", "w.bin", "m.onnx"),
)
_MEMORY = 6 << 30
_LIMIT_S = 20  # a small change may make a model large


class _LateError(BaseException):
    pass


def _late(*_: object) -> None:
    raise _LateError


def _value(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _linear() -> onnx.ModelProto:
    weights = np.random.default_rng(0).standard_normal((8, 300), dtype=np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    stored = [numpy_helper.from_array(weights, "w")]
    stored.append(numpy_helper.from_array(weights[0], "b"))
    graph = helper.make_graph(
        nodes, "g", [_value("x", ["N", 8])], [_value("y", ["N", 300])], stored
    )
    return helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)


def _image() -> onnx.ModelProto:
    weights = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), "w")
    axes = numpy_helper.from_array(np.array([2, 3], np.int64), "axes")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("ReduceMean", ["h", "axes"], ["m"], keepdims=0),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.float32(2))),
        helper.make_node("Mul", ["m", "c"], ["y"]),
    ]
    ends = [_value("x", ["N", 3, 8, 8])], [_value("y", ["N", 4])]
    graph = helper.make_graph(nodes, "g", *ends, [weights, axes])
    return helper.make_model(graph, opset_imports=_OPSETS, ir_version=10)


def _branches() -> onnx.ModelProto:
    bodies = [
        helper.make_graph([helper.make_node(kind, ["x"], [kind])], kind, [], [_value(kind, None)])
        for kind in ("Identity", "Neg")
    ]
    nodes = [
        helper.make_node("If", ["c"], ["h"], then_branch=bodies[0], else_branch=bodies[1]),
        helper.make_node("twice", ["h"], ["y"], domain="ours"),
    ]
    add = helper.make_node("Add", ["a", "a"], ["b"])
    twice = helper.make_function("ours", "twice", ["a"], ["b"], [add], _OPSETS)
    inputs = [_value("x", ["N", 4]), _value("c", [], TensorProto.BOOL)]
    graph = helper.make_graph(nodes, "g", inputs, [_value("y", ["N", 4])])
    opsets = [*_OPSETS, helper.make_opsetid("ours", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[twice])


def _external() -> onnx.ModelProto:
    model = _linear()
    weights = model.graph.initializer[0]
    data = len(weights.raw_data)
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(data))):
        weights.external_data.add(key=key, value=value)
    return model


SEEDS = (_linear, _image, _branches, _external)


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for each in value if field.label == field.LABEL_REPEATED else [value]:
                yield from _messages(each)


def _any_scalar(field: Any, chance: random.Random) -> Any:
    if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        text = chance.choice(_TEXTS)
        return text if field.type == field.TYPE_STRING else text.encode()
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return chance.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))
    return chance.choice(_NUMBERS)


def _change(message: Any, chance: random.Random) -> None:
    """Remove, repeat, copy or replace one field, of the right type."""
    fields = list(message.DESCRIPTOR.fields)
    held = [field for field, _ in message.ListFields()]
    field = chance.choice(held if held and chance.random() < 0.8 else fields)
    repeated = field.label == field.LABEL_REPEATED
    value = getattr(message, field.name)
    kind = chance.randrange(4)
    if kind == 0:
        message.ClearField(field.name)
    elif field.type == field.TYPE_MESSAGE:
        if not repeated:
            value.SetInParent()
        elif len(value) and kind == 1:
            del value[chance.randrange(len(value))]
        elif len(value):
            value.add().CopyFrom(chance.choice(value))
        else:
            value.add()
    elif repeated:
        if len(value) and kind == 1:
            del value[chance.randrange(len(value))]
        elif len(value) and kind == 2:
            value[chance.randrange(len(value))] = _any_scalar(field, chance)
        else:
            value.append(_any_scalar(field, chance))
    else:
        setattr(message, field.name, _any_scalar(field, chance))


def any_model(chance: random.Random) -> bytes:
    model = chance.choice(SEEDS)()
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        with contextlib.suppress(ValueError, TypeError, OverflowError):  # not of that range
            _change(chance.choice(list(_messages(model))), chance)
    data = bytearray(model.SerializeToString())
    while data and chance.random() < 0.2:
        data[chance.randrange(len(data))] = chance.choice((0, 1, 127, 128, 255))
    if chance.random() < 0.05:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


def _serve(path: Path) -> None:
    """What `serve` does before the first request."""
    from deploykit.serving.models.repository import ModelRepository
    from deploykit.serving.options import ServeOptions
    from deploykit.serving.serve import open_engines

    options = ServeOptions(device="cpu", threads=1, max_batch=4)
    engines = open_engines(path, options)
    repository = ModelRepository({"m": engines}, options)
    try:
        repository.warm_up()
    finally:
        repository.close(drain=False)


def verbs(path: Path) -> dict[str, Callable[[], object]]:
    out = path.with_name("out.onnx")
    data = path.with_name("d.npz")
    return {
        "inspect": lambda: dk.inspect(path),
        "fp16": lambda: dk.quantize(path, to="fp16", out=out, force=True),
        "int8": lambda: dk.quantize(path, to="int8", calib=data, out=out, force=True),
        "build": lambda: dk.build(path, profile="cpu", out=out, force=True),
        "compare": lambda: dk.compare(path, path),
        "predict": lambda: dk.predict(path, data, out=path.with_name("p.npz"), force=True),
        "serve": lambda: _serve(path),
    }


def main() -> None:
    folder, seed, most = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGALRM, _late)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    chance = random.Random(seed)
    random_numbers = np.random.default_rng(0)
    np.savez(folder / "d.npz", x=random_numbers.standard_normal((16, 8), dtype=np.float32))
    (folder / "w.bin").write_bytes(_linear().graph.initializer[0].raw_data)
    path = folder / "m.onnx"
    for number in range(most):
        path.write_bytes(any_model(chance))
        tried = verbs(path)
        for name in tried if number % 10 == 0 else chance.sample(sorted(tried), 2):
            sys.stdout.write(f"{number} {name}\n")
            sys.stdout.flush()
            signal.alarm(_LIMIT_S)
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    tried[name]()
            except (DeploykitError, MemoryError, _LateError):
                continue
            except Exception as exc:  # noqa: BLE001 - what the command line calls a bug
                frames = traceback.extract_tb(exc.__traceback__)[-4:]
                where = [f"{Path(each.filename).name}:{each.lineno}" for each in frames]
                line = f"BUG {number} {name} {type(exc).__name__}: {exc!s:.150} {where}"
                sys.stdout.write(line.replace("\n", " ") + "\n")
                path.with_name(f"bug-{seed}-{number}-{name}.onnx").write_bytes(path.read_bytes())
            finally:
                signal.alarm(0)
    sys.stdout.write("DONE\n")


if __name__ == "__main__":
    main()
