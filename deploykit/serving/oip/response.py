"""Collect the outputs that a request asks for: whole, classified or in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deploykit.core.tensors import Bytes
from deploykit.serving.oip.classification import classify
from deploykit.serving.oip.request import Memory, Request, RequestedOutput, Signature
from deploykit.serving.oip.tensors import to_bytes


class Result(NamedTuple):
    """One output to send. `array` is None if its elements were written to shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray | None
    requested: RequestedOutput

    def raw_contents(self) -> Bytes:
        """The elements as binary data; empty if they are in shared memory."""
        return b"" if self.array is None else to_bytes(self.array, self.datatype)


def collect_results(
    request: Request,
    outputs: Mapping[str, np.ndarray],
    model: Signature,
    memory: Memory | None = None,
) -> list[Result]:
    """The requested outputs in the order of the request.

    `memory`: as the request was decoded with. Raises what its `write` raises.
    """
    found = []
    for requested in request.outputs:
        array, datatype = outputs[requested.name], model.outputs[requested.name].datatype
        if requested.classes:
            labels, batched = model.labels.get(requested.name, ()), model.max_batch > 0
            array = classify(array, requested.classes, batched=batched, labels=labels)
            datatype = "BYTES"
        inline: np.ndarray | None = array
        if memory is not None and requested.region is not None:
            memory.write(requested.region, to_bytes(array, datatype))
            inline = None
        found.append(Result(requested.name, datatype, array.shape, inline, requested))
    return found
