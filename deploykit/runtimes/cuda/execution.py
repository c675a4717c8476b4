"""Run calls on a GPU with pinned staging memory, streams and graphs, copies overlapping compute.

Independent of TensorRT: a `Work` is anything that can be enqueued on a stream. Each slot has its
own stream, buffers and work, so that one slot computes while another one copies; a caller with one
call at a time only uses one slot.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from deploykit.core.ending import INSIDE
from deploykit.core.errors import DeploykitError
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.cuda.errors import DeviceLost
from deploykit.runtimes.cuda.memory import Driver, Shape
from deploykit.runtimes.cuda.slots import MakeWork, StreamSlot
from deploykit.runtimes.engine import Arrays, Closing


class Ticket:
    """One call in flight."""

    def __init__(self, pipeline: Pipeline, slot: StreamSlot) -> None:
        self.pipeline, self.slot = pipeline, slot
        self.answer: dict[str, np.ndarray] | DeploykitError | None = None

    def result(self) -> dict[str, np.ndarray]:
        """Wait for the outputs, which the caller owns. Raises DeviceLost and other CUDA errors."""
        if self.answer is None:
            self.pipeline.finish(self.slot)
        if isinstance(self.answer, dict):
            return self.answer
        raise self.answer or DeploykitError("the call has no answer")


class Pipeline(Closing):
    """Calls of one model, up to `slots` of them in flight; used by one thread at a time.

    `graphs`: batch sizes captured with their copies as a CUDA graph at their second run; other
    sizes are enqueued step by step. `pad`: fill a call with zero rows up to the next size of
    `graphs`, for models whose rows are independent. `scratch_bytes`: device memory for the work of
    each slot.
    """

    def __init__(
        self,
        driver: Driver,
        make: MakeWork,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        slots: int = 2,
        graphs: Sequence[int] = (),
        pad: bool = False,
        scratch_bytes: int = 0,
    ) -> None:
        self.driver, self.make = driver, make
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.graphs = tuple(sorted(graphs))
        first = {spec.shape[:1] for spec in (*inputs, *outputs)}
        self._paddable = len(first) == 1 and bool(inputs) and inputs[0].batched
        self.pad = pad and self._paddable
        self.scratch_bytes = scratch_bytes
        self._batched = next((n for n, spec in enumerate(self.inputs) if spec.batched), None)
        self.slots = slots
        self.last_copies_us = (0, 0)  # of the call that ended last, see `StreamSlot.copies_us`
        self._all: list[StreamSlot] = []
        self._free: list[StreamSlot] = []
        self._busy: dict[StreamSlot, Ticket] = {}  # in the order in which they were started
        self._lost: DeviceLost | None = None
        self._closed = False

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self.submit(feeds).result()

    def reserve(self, shapes: Sequence[Shape], slots: int = 1) -> None:
        """Take the memory for `slots` calls of these input shapes now. Raises OutOfMemory."""
        self.check()
        found = []
        try:
            for _ in range(slots):
                found.append(self._idle())
                found[-1].reserve(tuple(shapes))
        finally:
            self._free += found

    def prepare(self, calls: Iterable[Arrays], *, pad: bool = False) -> None:
        """Run each call in every slot, twice if it may become a graph: later it takes no memory.

        The largest first, as a buffer that grows drops the graphs. No other size becomes one any
        more. `pad`: see above.
        """
        self.pad = self.pad or (pad and self._paddable)
        wanted, self.graphs = self.graphs, ()
        for feeds in calls:
            rows = None if self._batched is None else len(feeds[self.inputs[self._batched].name])
            prepared = wanted if rows is None else [n for n in wanted if n == rows]
            self.graphs = tuple(sorted({*self.graphs, *prepared}))
            for _ in range(2 if self.graphs else 1):
                for ticket in [self.submit(feeds) for _ in range(self.slots)]:
                    ticket.result()

    def map(self, batches: Iterable[Arrays]) -> Iterator[dict[str, np.ndarray]]:
        """The outputs in order, with all slots busy."""
        return run_in_order(self.submit, batches, self.slots)

    def submit(self, feeds: Arrays) -> Ticket:
        """Copy `feeds`, which fit `inputs`, and start the call; waits only for a slot.

        Raises OutOfMemory, after which a smaller call may do, DeviceLost, or what `Work` raises.
        """
        self.check()
        arrays = [feeds[spec.name] for spec in self.inputs]
        rows = None if self._batched is None else len(arrays[self._batched])
        run, capture = self.bucket(rows)
        slot = self._idle()
        try:
            with INSIDE:
                slot.start(arrays, None if run == rows else run, capture)
        except BaseException as exc:
            lost = slot.settle()  # its copies may still be reading the staging memory
            self._free.append(slot)
            self._lost = exc if isinstance(exc, DeviceLost) else lost
            if self._lost in (None, exc) or not isinstance(exc, DeploykitError):
                raise
            raise self._lost from exc
        ticket = self._busy[slot] = Ticket(self, slot)
        return ticket

    def check(self) -> None:
        """Make the device this thread's. Raises DeviceLost once it is, and after `close`."""
        if self._closed:
            raise DeploykitError(f"{self.driver.device}: the pipeline is closed")
        if self._lost is not None:
            raise self._lost
        self.driver.use()

    def finish(self, slot: StreamSlot) -> None:
        """Wait for the call in flight in `slot` and store its answer in its ticket."""
        with INSIDE:
            answer = slot.finish()
        self.last_copies_us = slot.copies_us
        self._busy.pop(slot).answer = answer
        self._free.append(slot)
        if isinstance(answer, DeviceLost):
            self._lost = answer

    @property
    def notes(self) -> tuple[str, ...]:
        """Why a requested CUDA graph was not captured."""
        return tuple(note for slot in self._all for note in slot.notes)

    def bucket(self, rows: int | None) -> tuple[int | None, bool]:
        """(rows to run, whether as a graph) for a call of `rows`, None for a fixed shape."""
        if rows is None or rows in self.graphs:
            return rows, bool(self.graphs)
        larger = [size for size in self.graphs if size >= rows] if self.pad and rows else []
        return (larger[0], True) if larger else (rows, False)

    def close(self) -> None:
        """Finish the calls in flight and release all memory."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(DeploykitError):
            self.driver.use()
        for slot in list(self._busy):
            self.finish(slot)
        for slot in self._all:
            slot.release()

    def _idle(self) -> StreamSlot:
        """An idle slot: a used one, else a new one, else the oldest call's once it has finished.

        A second slot takes memory only when two calls are in flight.
        """
        if not self._free and len(self._all) < self.slots:
            slot = StreamSlot(self.driver, self.make, self.inputs, self.outputs, self.scratch_bytes)
            self._all.append(slot)
            return slot
        if not self._free:
            self.finish(next(iter(self._busy)))
        return self._free.pop()


def run_in_order(
    submit: Callable[[Arrays], Ticket], batches: Iterable[Arrays], slots: int
) -> Iterator[dict[str, np.ndarray]]:
    """Each call's outputs in order, with up to `slots` calls in flight."""
    waiting: deque[Ticket] = deque()
    for feeds in batches:
        waiting.append(submit(feeds))
        if len(waiting) == slots:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
