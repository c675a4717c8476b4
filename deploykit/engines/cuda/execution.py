"""Run calls on a GPU with pinned staging memory, streams and graphs, copies overlapping compute.

A `Work` is anything that can be enqueued on a stream, so this file does not depend on TensorRT.
Each slot has its own stream, buffers and work, so that one slot computes while another one copies;
a caller with one call at a time uses only one slot.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deploykit.core.errors import DeploykitError, DeviceLost, unless_lost
from deploykit.core.subprocesses import INSIDE
from deploykit.core.tensors import Specs, TensorSpec
from deploykit.engines.engine import Arrays, Closing

if TYPE_CHECKING:
    from deploykit.engines.cuda.driver import CudaDevice

_MOST_LAYOUTS = 64  # shapes whose views a slot keeps
_MOST_GRAPHS = 16  # each holds its own work and GPU memory

log = logging.getLogger(__name__)

Shape = tuple[int, ...]


class Buffer:
    """Memory for one tensor of one slot: pinned, and on the device unless `host_only`."""

    def __init__(self, driver: CudaDevice, *, host_only: bool = False) -> None:
        self.driver, self.host_only = driver, host_only
        self.host = self.device = self.size = 0

    def fits(self, nbytes: int) -> bool:
        return 0 < self.size >= nbytes

    def reserve(self, nbytes: int) -> None:
        """Grow to at least `nbytes`, losing the content. Raises OutOfMemory, and is then empty."""
        if self.fits(nbytes):
            return
        self.release()  # release first, as both together may not fit
        step = max(512, 1 << max(0, nbytes.bit_length() - 3))  # small growth needs no new block
        size = max(1, -(-nbytes // step)) * step
        try:
            self.host = self.driver.pin(size)
            if not self.host_only and self.driver.integrated:
                self.device = self.driver.device_address(self.host)
            elif not self.host_only:
                self.device = self.driver.allocate(size)
        except DeploykitError:
            self.release()
            raise
        self.size = size

    def view(self, dtype: str, shape: Shape) -> np.ndarray:
        nbytes = byte_count(dtype, shape)
        return self.driver.array(self.host, self.size)[:nbytes].view(dtype).reshape(shape)

    def release(self) -> None:
        host, device = self.host, self.device
        self.host = self.device = self.size = 0
        if not self.driver.integrated:
            give_back(self.driver.free, device)
        give_back(self.driver.unpin, host)


def give_back(release: Callable[[int], object], handle: int) -> None:
    """Release memory or a handle, 0 for none. A lost device has done so itself."""
    with contextlib.suppress(DeploykitError):
        if handle:
            release(handle)


def byte_count(dtype: str, shape: Shape) -> int:
    return math.prod(shape, start=np.dtype(dtype).itemsize)


# A work is that of one stream, as `engines.tensorrt.engine.Context`; it raises only DeploykitError.
Work = Any
MakeWork = Callable[[int, int], Work]  # (stream, address of its scratch memory) -> Work


@dataclass(frozen=True)
class Model:
    """A model as a pipeline runs it. `scratch_bytes`: device memory for the work of each slot."""

    driver: CudaDevice
    make: MakeWork
    inputs: Specs
    outputs: Specs
    scratch_bytes: int = 0


@dataclass
class _Layout:
    """The views into the staging memory and the copies for calls of certain shapes.

    `shared`: its work runs other shapes too. `copies_in`, `copies_out`: destination, source, bytes.
    """

    work: Work
    shapes: Mapping[str, Shape]
    shared: bool
    capture: bool = False
    feeds: list[np.ndarray] = field(default_factory=list)
    answers: dict[str, np.ndarray] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    copies_in: list[tuple[int, int, int]] = field(default_factory=list)
    copies_out: list[tuple[int, int, int]] = field(default_factory=list)
    late: list[TensorSpec] = field(default_factory=list)
    graph: int = 0
    runs: int = 0


class StreamSlot:
    """A stream, its buffers and its work; idle, or with one call in flight.

    `start` stages the inputs in pinned memory, enqueues copies and work, and returns; `finish`
    waits. The layout of each combination of shapes is kept.
    """

    def __init__(self, owner: Pipeline) -> None:
        model = owner.model
        self.driver, self.make = model.driver, model.make
        self.inputs, self.outputs = model.inputs, model.outputs
        self.notes: list[str] = []  # reasons why a graph was refused
        self.copies_us = (0, 0)  # the last call's copies on the host, to and from pinned memory
        self.stream = self.event = self.scratch = 0
        self._rows: int | None = None
        self._running: _Layout  # since the first call
        self._buffers: dict[str, Buffer] = {}
        self._works: dict[tuple[Shape, ...] | None, Work] = {}
        self._layouts: dict[tuple[Shape, ...], _Layout] = {}
        self._bound: _Layout | None = None  # the layout that the shared work is set to
        self._late: dict[str, Buffer] = {}
        try:
            self.stream = self.driver.open_stream()
            self.event = self.driver.open_event()
            if model.scratch_bytes:
                self.scratch = self.driver.allocate(model.scratch_bytes)
        except DeploykitError:
            self.release()
            raise

    def reserve(self, shapes: tuple[Shape, ...]) -> None:
        """Allocate the memory for a call of these input shapes that is not a graph."""
        if shapes not in self._layouts:
            self._lay_out(shapes, capture=False)
            del self._layouts[shapes]  # a call may use a graph
            self._bound = None

    def start(self, arrays: Sequence[np.ndarray], rows: int | None, capture: bool) -> None:
        """Enqueue a call; with `capture`, as a graph from its second run on.

        `rows`: pad axis 0 of every array with zeros up to this size; None for no padding.
        """
        key = tuple(a.shape if rows is None else (rows, *a.shape[1:]) for a in arrays)
        layout = self._layouts.get(key) or self._lay_out(key, capture)
        before_ns = time.perf_counter_ns()
        for view, array in zip(layout.feeds, arrays, strict=True):
            np.copyto(view if rows is None else view[: len(array)], array)
            if rows is not None:
                view[len(array) :] = 0
        self.copies_us = ((time.perf_counter_ns() - before_ns) // 1000, 0)
        self._rows = None if rows is None else len(arrays[0])
        self._running = layout
        if layout.capture and not layout.graph and layout.runs:
            self._capture(layout)
        if layout.graph:
            self.driver.launch(layout.graph, self.stream)
        else:
            self._enqueue(layout)
        layout.runs += 1
        self.driver.record(self.event, self.stream)

    def finish(self) -> dict[str, np.ndarray] | DeploykitError:
        """Wait for the call in flight; return its outputs in new arrays, or its error."""
        try:
            self.driver.use()  # the thread may differ from that of `start`
            self.driver.wait(self.event)
        except DeploykitError as exc:
            return exc if isinstance(exc, DeviceLost) else self.settle() or exc
        before_ns = time.perf_counter_ns()
        rows = self._rows
        answers = {
            name: (view if rows is None else view[:rows]).copy()
            for name, view in self._running.answers.items()
        }
        self.copies_us = (self.copies_us[0], (time.perf_counter_ns() - before_ns) // 1000)
        return answers

    def settle(self) -> DeviceLost | None:
        """Wait, after a failure, until nothing reads or writes the buffers.

        Returns the loss of the device if that was the cause, as the failing library may give
        another reason or none.
        """
        try:
            with unless_lost():
                self.driver.wait_stream(self.stream)
            self.driver.check()
        except DeviceLost as exc:
            return exc
        return None

    def release(self) -> None:
        self._drop_layouts()
        for work in self._works.values():
            work.close()
        self._works.clear()
        for buffer in (*self._buffers.values(), *self._late.values()):
            buffer.release()
        give_back(self.driver.free, self.scratch)
        give_back(self.driver.close_event, self.event)
        give_back(self.driver.close_stream, self.stream)
        self.stream = self.event = self.scratch = 0

    def _lay_out(self, key: tuple[Shape, ...], capture: bool) -> _Layout:
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts = {k: v for k, v in self._layouts.items() if v.graph}
        inputs, outputs = self.inputs, self.outputs
        capture = capture and (key in self._works or len(self._works) <= _MOST_GRAPHS)
        shapes = {spec.name: shape for spec, shape in zip(inputs, key, strict=True)}
        # TensorRT's graph is valid while its context is unchanged, so each graph has its own.
        own = key if capture else None
        if own not in self._works:
            self._works[own] = self.make(self.stream, self.scratch)
        layout = _Layout(self._works[own], shapes, shared=not capture)
        if layout.shared:
            self._bound = None
        found = layout.work.shapes(shapes)
        sizes = {}
        for spec in (*inputs, *outputs):
            shape = shapes.get(spec.name, found.get(spec.name))
            if shape is None:
                layout.late.append(spec)
            else:
                sizes[spec.name] = (spec, shape, byte_count(spec.dtype, shape))
                self._buffers.setdefault(spec.name, Buffer(self.driver))
        layout.capture = capture and not layout.late
        if not all(self._buffers[name].fits(nbytes) for name, (_, _, nbytes) in sizes.items()):
            self._drop_layouts()  # views and graphs point into the old buffers
            for name, (_, _, nbytes) in sizes.items():
                self._buffers[name].reserve(nbytes)
        layout.answers = {spec.name: np.empty(0) for spec in outputs}  # keeps their order
        for name, (spec, shape, nbytes) in sizes.items():
            buffer = self._buffers[name]
            view = buffer.view(spec.dtype, shape)
            layout.addresses[name] = buffer.device
            copied = nbytes > 0 and not self.driver.integrated
            if name in shapes:
                layout.feeds.append(view)
                layout.copies_in += [(buffer.device, buffer.host, nbytes)] * copied
            else:
                layout.answers[name] = view
                layout.copies_out += [(buffer.host, buffer.device, nbytes)] * copied
        layout.work.bind(layout.addresses)
        self._layouts[key] = layout
        if layout.shared:
            self._bound = layout
        return layout

    def _drop_layouts(self) -> None:
        for layout in self._layouts.values():
            give_back(self.driver.drop_graph, layout.graph)
        self._layouts.clear()
        self._bound = None

    def _enqueue(self, layout: _Layout) -> None:
        driver, stream = self.driver, self.stream
        if layout.shared and self._bound is not layout:
            layout.work.shapes(layout.shapes)
            layout.work.bind(layout.addresses)
            self._bound = layout
        for device, host, nbytes in layout.copies_in:
            driver.copy_in(device, host, nbytes, stream)
        layout.work.enqueue(stream)
        for host, device, nbytes in layout.copies_out:
            driver.copy_out(host, device, nbytes, stream)
        for spec in layout.late:  # copied into memory of their own
            address, shape = layout.work.late(spec.name)
            buffer = self._late.setdefault(spec.name, Buffer(driver, host_only=True))
            nbytes = byte_count(spec.dtype, shape)
            buffer.reserve(nbytes)
            if nbytes:
                driver.copy_out(buffer.host, address, nbytes, stream)
            layout.answers[spec.name] = buffer.view(spec.dtype, shape)

    def _capture(self, layout: _Layout) -> None:
        """Capture the whole sequence as a graph; on failure note the reason and run without."""
        refused: BaseException | None = None
        graph = 0
        self.driver.begin_capture(self.stream)
        try:
            self._enqueue(layout)
        except BaseException as exc:  # noqa: BLE001 - raised below, or noted
            refused = exc
        try:  # a stream that still captures runs nothing
            graph = self.driver.end_capture(self.stream)
        except DeploykitError as exc:
            refused = refused or exc
        if refused is None:
            layout.graph = graph
            return
        if graph:
            self.driver.drop_graph(graph)
        if isinstance(refused, DeviceLost) or not isinstance(refused, DeploykitError):
            raise refused
        layout.capture = False
        shapes = ", ".join(str(list(shape)) for shape in layout.shapes.values())
        self.notes.append(f"{self.driver.device}: no CUDA graph for {shapes}: {refused}")
        log.warning(self.notes[-1])


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
    """Runs calls of one model, up to `slots` of them in flight, for one thread at a time.

    `graphs`: batch sizes captured with their copies as a CUDA graph at their second run; other
    sizes are enqueued step by step.
    """

    def __init__(self, model: Model, *, slots: int = 2, graphs: Sequence[int] = ()) -> None:
        self.model, self.driver, self.inputs = model, model.driver, model.inputs
        self.graphs = tuple(sorted(graphs))
        first = {spec.shape[:1] for spec in (*model.inputs, *model.outputs)}
        self._paddable = len(first) == 1 and bool(self.inputs) and self.inputs[0].batched
        self.pad = False  # see `prepare`
        self._batched = next((n for n, spec in enumerate(self.inputs) if spec.batched), None)
        self.slots = slots
        self.last_copies_us = (0, 0)  # the last ended call's `StreamSlot.copies_us`
        self._all: list[StreamSlot] = []
        self._free: list[StreamSlot] = []
        self._busy: dict[StreamSlot, Ticket] = {}  # in starting order
        self._lost: DeviceLost | None = None
        self._closed = False

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self.submit(feeds).result()

    def reserve(self, shapes: Sequence[Shape], slots: int = 1) -> None:
        """Allocate the memory for `slots` calls of these input shapes. Raises OutOfMemory."""
        self.check()
        found: list[StreamSlot] = []
        try:
            for _ in range(slots):
                found.append(self._idle())
                with self._failing(found[-1]):
                    found[-1].reserve(tuple(shapes))
        finally:
            self._free += found

    def prepare(self, calls: Iterable[Arrays], *, pad: bool = False) -> None:
        """Run each call in every slot, twice for a graph, so that later calls allocate nothing.

        The largest call runs first, as a growing buffer drops the graphs. Afterwards no other size
        is captured. `pad`: fill a call with zero rows up to the next size of `graphs`, for models
        whose rows are independent.
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

    def submit(self, feeds: Arrays) -> Ticket:
        """Copy `feeds`, which fit `inputs`, and start the call; waits only for a slot.

        Raises OutOfMemory, after which a smaller call may work, DeviceLost, or what `Work` raises.
        """
        self.check()
        arrays = [feeds[spec.name] for spec in self.inputs]
        rows = None if self._batched is None else len(arrays[self._batched])
        run, capture = self.bucket(rows)
        slot = self._idle()
        try:
            with INSIDE, self._failing(slot):
                slot.start(arrays, None if run == rows else run, capture)
        except BaseException:
            self._free.append(slot)
            raise
        ticket = self._busy[slot] = Ticket(self, slot)
        return ticket

    @contextlib.contextmanager
    def _failing(self, slot: StreamSlot) -> Iterator[None]:
        """After a failure, wait for the slot, and raise DeviceLost if the device is lost."""
        try:
            yield
        except BaseException as exc:
            lost = slot.settle()  # its copies may still be reading the staging memory
            self._lost = exc if isinstance(exc, DeviceLost) else lost
            if self._lost in (None, exc) or not isinstance(exc, DeploykitError):
                raise
            raise self._lost from exc

    def check(self) -> None:
        """Use the device in this thread. Raises DeviceLost if it is lost, and after `close`."""
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
        return tuple(note for slot in self._all for note in slot.notes)

    def bucket(self, rows: int | None) -> tuple[int | None, bool]:
        """Return (rows to run, whether as a graph) for a call of `rows`, None for fixed shapes."""
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
        """Return an idle slot: a used one, a new one, or that of the oldest call, once finished.

        A second slot takes memory only when two calls are in flight.
        """
        if not self._free and len(self._all) < self.slots:
            self._all.append(StreamSlot(self))
            return self._all[-1]
        if not self._free:
            self.finish(next(iter(self._busy)))
        return self._free.pop()
