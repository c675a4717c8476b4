"""Strings are handled in parts: one call of C for a million of them would stop the event loop."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest

from deploykit.core.errors import TooLarge, quote
from deploykit.core.tensors import MOST_STRINGS, TensorSpec
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.batching.queue import Pending
from deploykit.serving.batching.runner import Runner, Splitter, stack
from deploykit.serving.oip import tensors
from deploykit.serving.oip.request import Binary, InputData, plan, signature
from deploykit.serving.oip.tensors import array_bytes
from tests.support.serving.grpc_cases import Echo
from tests.support.serving.loops import KEY

SPECS = [TensorSpec("x", "string", ("N", "W"))]


def test_strings_are_measured_and_encoded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_BLOCK", 4)
    array = np.array([["a" * n for n in range(5)], [b"\xff", "é", 1, "", "z"]], object)
    assert [block.size for block in tensors.string_blocks(array)] == [4, 4, 2]
    wanted = b"".join(
        len(data).to_bytes(4, "little") + data
        for data in (b"", b"a", b"aa", b"aaa", b"aaaa", b"\xff", "é".encode(), b"1", b"", b"z")
    )
    assert tensors.to_bytes(array, "BYTES") == wanted
    assert array_bytes(array) == array.nbytes + sum(map(sys.getsizeof, array.flat))


@pytest.mark.parametrize("count", [MOST_STRINGS, MOST_STRINGS + 1])
def test_the_strings_of_an_input_are_bounded(count: int) -> None:
    model = signature(SPECS, SPECS, 32, 1 << 30)
    item = InputData("x", "BYTES", [1, count], Binary(None, 0, 4 * count))
    if count > MOST_STRINGS:
        with pytest.raises(TooLarge, match="more than 262144 strings"):
            plan([item], None, {}, None, model)
    else:
        assert plan([item], None, {}, None, model).parts[0].elements == count


@pytest.mark.parametrize(("width", "batches"), [(3, [4]), (MOST_STRINGS // 2, [1, 1, 1, 1])])
def test_the_strings_of_a_batch_are_bounded(width: int, batches: list[int]) -> None:
    engine, rows = Echo("string", "W"), list[int]()

    def join(batch: list[Pending]) -> dict[str, np.ndarray]:
        rows.append(len(batch))
        return dict(stack(batch))

    runner = Runner(engine, "m", join, Splitter(engine.outputs, joined=True), monotonic_us)  # type: ignore[arg-type]
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
