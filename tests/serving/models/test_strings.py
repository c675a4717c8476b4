"""Strings: bounded, handled in parts that do not stop the event loop, and one label per row."""

from __future__ import annotations

import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deploykit.core.errors import TooLarge, Unsupported, quote
from deploykit.core.tensors import MOST_STRINGS, TensorSpec
from deploykit.engines.engine import load
from deploykit.serving.batching.batcher import Runner, Splitter, monotonic_us
from deploykit.serving.batching.queue import BatchPolicy, Pending, RequestQueue, stack
from deploykit.serving.oip import request as oip
from deploykit.serving.oip.request import Binary, array_bytes, plan, signature
from tests.support.serving.grpc_cases import Echo
from tests.support.serving.loops import KEY
from tests.support.serving.running import running
from tests.support.string_labels import labels_of, samples, write_classifier


def test_strings_are_measured_and_encoded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oip, "_BLOCK", 4)
    array = np.array([["a" * n for n in range(5)], [b"\xff", "é", 1, "", "z"]], object)
    assert [block.size for block in oip.string_blocks(array)] == [4, 4, 2]
    wanted = b"".join(
        len(data).to_bytes(4, "little") + data
        for data in (b"", b"a", b"aa", b"aaa", b"aaaa", b"\xff", "é".encode(), b"1", b"", b"z")
    )
    assert oip.to_bytes(array, "BYTES") == wanted
    assert array_bytes(array) == array.nbytes + sum(map(sys.getsizeof, array.flat))


def test_the_strings_of_an_input_are_bounded() -> None:
    specs = [TensorSpec("x", "string", ("N", "W"))]
    model = signature(specs, specs, 32, 1 << 30)
    x = {"name": "x", "datatype": "BYTES"}
    most, more = (
        {"inputs": [{**x, "shape": [1, count], "data": Binary(0, 4 * count)}]}
        for count in (MOST_STRINGS, MOST_STRINGS + 1)
    )
    assert plan(most, model).parts[0].elements == MOST_STRINGS
    with pytest.raises(TooLarge, match="more than 262144 strings"):
        plan(more, model)


@pytest.mark.parametrize(("width", "batches"), [(3, [4]), (MOST_STRINGS // 2, [1, 1, 1, 1])])
def test_the_strings_of_a_batch_are_bounded(width: int, batches: list[int]) -> None:
    engine, rows = Echo("string", "W"), list[int]()

    def join(batch: list[Pending]) -> dict[str, np.ndarray]:
        rows.append(len(batch))
        return dict(stack(batch))

    split, queue = Splitter(engine.outputs, joined=True), RequestQueue(BatchPolicy())
    runner = Runner(engine, "m", join, split, monotonic_us, queue)  # type: ignore[arg-type]
    array = np.full((1, width), "a", object)
    requests = [Pending({"x": array}, 1, KEY, lambda _: None, 0, 0, 0) for _ in range(4)]
    assert runner.finish(runner.start(requests, 0), []) == [None] * 4
    assert rows == batches
    assert all(request.outputs["y"].shape == (1, width) for request in requests)


@pytest.mark.parametrize("value", ["é" * 5_000_000, b"\xff" * 5_000_000, [10**9] * 1_000_000])
def test_a_long_value_is_cut_before_it_is_quoted(value: object) -> None:
    short = quote(value[:200])  # type: ignore[index]
    tracemalloc.start()
    try:
        assert quote(value) == short
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def label(module: Any, port: int, x: np.ndarray) -> list[str]:
    tensor = module.InferInput("X", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return [each.decode() for each in client.infer("m", [tensor]).as_numpy("label")]


def test_each_of_many_requests_gets_the_labels_of_its_own_rows(tmp_path: Path) -> None:
    http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    x, path = samples(48), write_classifier(tmp_path / "m.onnx")
    parts = [x[at : at + 1 + at % 3] for at in range(40)]
    with (
        load(path, "cpu") as engine,
        running({"m": engine}, grpc_port=0) as server,
        ThreadPoolExecutor(16) as pool,
    ):
        assert server.ask("GET", "/v2/models/m/config").json["max_batch_size"] == 32
        for module, port in ((http, server.port), (grpc, server.server.grpc_port)):
            answers = list(pool.map(lambda part: label(module, port, part), parts))  # noqa: B023
            assert answers == [labels_of(part) for part in parts]


def test_the_probabilities_of_zipmap_are_refused_with_the_way_to_write_them(tmp_path: Path) -> None:
    model = onnx.load(write_classifier(tmp_path / "m.onnx"))
    names = {"classlabels_strings": ["setosa", "versicolor", "virginica"]}
    scores = model.graph.output[1].name
    zipped = onnx.helper.make_node("ZipMap", [scores], ["maps"], domain="ai.onnx.ml", **names)
    model.graph.node.append(zipped)
    kind = onnx.TypeProto()
    kind.sequence_type.elem_type.map_type.key_type = onnx.TensorProto.STRING
    value = kind.sequence_type.elem_type.map_type.value_type.tensor_type
    value.elem_type = onnx.TensorProto.FLOAT
    model.graph.output[1].CopyFrom(onnx.helper.make_value_info("maps", kind))
    onnx.save(model, tmp_path / "zip.onnx")
    with pytest.raises(Unsupported) as refused:
        load(tmp_path / "zip.onnx", "cpu")
    assert "options={'zipmap': False}" in (refused.value.hint or "")
