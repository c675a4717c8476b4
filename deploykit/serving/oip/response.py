"""Collect the outputs that a request asks for: whole, classified or in shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deploykit.serving.oip.request import Request, RequestedOutput, Signature
from deploykit.serving.oip.tensors import to_bytes
from deploykit.serving.shared_memory import SharedMemory


def classify(array: np.ndarray, classes: int, *, batched: bool) -> np.ndarray:
    """Return the `classes` highest values of each row as `value:index`, highest first.

    All axes but the batch axis are flattened. Among equal values the lower index comes first;
    NaN comes last. Floats have six decimals, as in other servers of the protocol.
    """
    rows = len(array) if batched else 1
    values = array.reshape(rows, math.prod(array.shape[1 if batched else 0 :]))
    floats = values.dtype.kind == "f"
    descending = -values if floats else ~values  # which cannot overflow
    order = np.argsort(descending, axis=1, kind="stable")[:, :classes]
    strings = np.empty(order.shape, object)
    for place, index in np.ndenumerate(order):
        value = values[place[0], index]
        strings[place] = f"{value:.6f}:{index}" if floats else f"{int(value)}:{index}"
    return strings if batched else strings[0]


class Result(NamedTuple):
    """One output to send. `array` is None if its elements were written to shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray | None
    requested: RequestedOutput


def collect_results(
    request: Request,
    outputs: Mapping[str, np.ndarray],
    model: Signature,
    memory: SharedMemory | None = None,
) -> list[Result]:
    """Return the requested outputs in the order of the request.

    `memory`: the same as for decoding the request. Raises the errors of its `write`.
    """
    found = []
    for requested in request.outputs:
        array, datatype = outputs[requested.name], model.outputs[requested.name].datatype
        if requested.classes:
            array = classify(array, requested.classes, batched=model.max_batch > 0)
            datatype = "BYTES"
        inline: np.ndarray | None = array
        if memory is not None and requested.region is not None:
            memory.write(requested.region, to_bytes(array, datatype))
            inline = None
        found.append(Result(requested.name, datatype, array.shape, inline, requested))
    return found
