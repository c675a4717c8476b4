"""An engine's outputs as the Open Inference Protocol sends them, apart from HTTP or gRPC.

In: a `Request` and the outputs of the engine for it. Out: `Result`s in the order asked, classified
or written to shared memory where that was asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deploykit.serving.oip.classification import classified
from deploykit.serving.oip.request import Memory, Request, Signature, Wanted
from deploykit.serving.oip.tensors import to_bytes


class Result(NamedTuple):
    """One output to send. `array` has the elements, unless they were written to shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray | None
    wanted: Wanted

    def payload(self) -> bytes:
        """The elements as binary data; none where they are in shared memory."""
        return b"" if self.array is None else to_bytes(self.array, self.datatype)


def results(
    request: Request,
    outputs: Mapping[str, np.ndarray],
    model: Signature,
    memory: Memory | None = None,
) -> list[Result]:
    """What to send of an engine's outputs, in the order asked.

    `memory` is what the request was decoded with. Raises what its `write` raises.
    """
    found = []
    for wanted in request.outputs:
        array, datatype = outputs[wanted.name], model.outputs[wanted.name].datatype
        if wanted.classes:
            array, datatype = best(wanted, array, model), "BYTES"
        kept: np.ndarray | None = array
        if memory is not None and wanted.region is not None:
            memory.write(wanted.region, to_bytes(array, datatype))
            kept = None
        found.append(Result(wanted.name, datatype, array.shape, kept, wanted))
    return found


def best(wanted: Wanted, array: np.ndarray, model: Signature) -> np.ndarray:
    """The highest values of an output, as many as are wanted."""
    labels = model.labels.get(wanted.name, ())
    return classified(array, wanted.classes, batched=model.max_batch > 0, labels=labels)
