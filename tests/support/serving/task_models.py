"""Small ONNX models with a task in their manifest: what they answer can be read off an image."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import onnx
import onnx.parser

from deploykit.core.artefact import Manifest, write_manifest
from deploykit.core.task import ImageInput, Task, TaskOutputs, TextInput
from deploykit.core.tensors import TensorSpec, parse_spec
from tests.support.runtimes.tokenizer import write_tokenizer

HEIGHT, WIDTH = 16, 24
_IMAGE = f"image:uint8[N,{HEIGHT},{WIDTH},3]"
_HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
# "light" and its opposite: how bright the image is, from 0 to 1
_BRIGHTNESS = """
    pixels = Cast<to=1>(image)
    white = Constant<value_float=255.0>()
    one = Constant<value_float=1.0>()
    shares = Div(pixels, white)
    mean = ReduceMean<axes=[1, 2, 3], keepdims=0>(shares)
    last = Constant<value_ints=[1]>()
    light = Unsqueeze(mean, last)
    dark = Sub(one, light)
"""
_BODIES = {
    "classify": f"{_BRIGHTNESS} scores = Concat<axis=1>(dark, light)",
    # the left half as "light", sure as it is bright, and the whole as "dark"
    "detect": f"""{_BRIGHTNESS} scores = Concat<axis=1>(light, dark)
    zero = Constant<value_float=0.0>()
    nothing = Mul(light, zero)
    places = Constant<value = float[1, 2, 4] {{0, 0, 12, 16, 0, 0, 24, 16}}>()
    deep = Unsqueeze(nothing, last)
    boxes = Add(places, deep)
    numbers = Constant<value = float[1, 2] {{1, 0}}>()
    wide = Add(numbers, nothing)
    classes = Cast<to=7>(wide)""",
    "segment": """
    pixels = Cast<to=1>(image)
    grey = ReduceMean<axes=[3], keepdims=0>(pixels)
    half = Constant<value_float=127.0>()
    bright = Greater(grey, half)
    mask = Cast<to=7>(bright)""",
    "embed": """
    pixels = Cast<to=1>(image)
    mean = ReduceMean<axes=[1, 2], keepdims=0>(pixels)
    embedding = LpNormalization<axis=1, p=2>(mean)""",
    # the share of the word "good", number 3, among the tokens
    "text-classify": """
    three = Constant<value_int=3>()
    found = Equal(ids, three)
    hits = Cast<to=1>(found)
    real = Cast<to=1>(mask)
    along = Constant<value_ints=[1]>()
    sum = ReduceSum<keepdims=1>(hits, along)
    count = ReduceSum<keepdims=1>(real, along)
    good = Div(sum, count)
    one = Constant<value_float=1.0>()
    bad = Sub(one, good)
    scores = Concat<axis=1>(bad, good)""",
}
_OUTPUTS = {
    "classify": ["scores:float32[N,2]"],
    "detect": ["scores:float32[N,2]", "boxes:float32[N,2,4]", "classes:int64[N,2]"],
    "segment": [f"mask:int64[N,{HEIGHT},{WIDTH}]"],
    "embed": ["embedding:float32[N,3]"],
    "text-classify": ["scores:float32[N,2]"],
}
_TYPES = {"float32": "float", "int64": "int64", "uint8": "uint8"}


def _declared(spec: TensorSpec) -> str:
    return f"{_TYPES[spec.dtype]}[{', '.join(map(str, spec.shape))}] {spec.name}"


def write_task_model(folder: Path, kind: str, **more: Any) -> Path:
    """Write KIND.onnx with its manifest; `more`: fields of the Task, or of its image."""
    path = folder / f"{kind}.onnx"
    inputs = ["ids:int64[N,T]", "mask:int64[N,T]"] if kind == "text-classify" else [_IMAGE]
    takes, gives = ([parse_spec(each) for each in specs] for specs in (inputs, _OUTPUTS[kind]))
    declared = [", ".join(map(_declared, specs)) for specs in (takes, gives)]
    graph = f"{_HEAD} {kind.replace('-', '_')} ({declared[0]}) => ({declared[1]}) {{"
    model = onnx.parser.parse_model(graph + _BODIES[kind] + "}")
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    names = TaskOutputs(**{spec.name: spec.name for spec in gives})
    task: dict[str, Any] = {"labels": ("dark", "light"), **more}
    if kind == "text-classify":
        sha256 = write_tokenizer(folder / "words.json")
        task["labels"] = ("bad", "good")
        task["text"] = TextInput("ids", "words.json", sha256, 8, mask="mask")
    else:
        task.setdefault("image", ImageInput("image", HEIGHT, WIDTH))
    write_manifest(
        path,
        Manifest(
            "onnx",
            tuple(takes),
            tuple(gives),
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            task=Task(kind, names, **task),
        ),
    )
    return path
