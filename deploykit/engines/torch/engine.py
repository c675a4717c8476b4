"""Run a PyTorch module as the reference Engine: eager, float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from deploykit.core.artefact import ArtefactLike, torch_kind
from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.core.extras import require
from deploykit.core.tensors import Specs
from deploykit.engines.engine import Arrays, CallGuard, Engine, check_feeds
from deploykit.engines.torch.files import RunsCode, module_errors, read
from deploykit.engines.torch.loaded import Loaded, Undescribed
from deploykit.engines.torch.open import load_module
from deploykit.engines.torch.outputs import to_numpy

torch = require("torch")


def open_engine(
    source: ArtefactLike,
    device: str = "auto",
    threads: int | None = None,
    trust: bool = False,  # noqa: ARG001 - no code of the file runs here
    *,
    arch: str | None = None,
    inputs: Specs = (),
    bf16: bool = False,
) -> TorchEngine:
    """Open a deploykit checkpoint, or a file of weights whose module `arch` builds for `inputs`.

    Raises BadInput for a file without enough information.
    """
    path = Path(source)
    try:
        loaded = load_module(path, arch=arch, inputs=inputs)
    except (RunsCode, Undescribed) as exc:
        if arch is None:
            known = getattr(exc, "arch", "")
            exc.hint = f"export it first: deploykit export {path}" + f" --arch {known}" * bool(
                known
            )
        raise
    return TorchEngine(loaded, path.name, device, threads, bf16=bf16)


def open_like(
    source: ArtefactLike, inputs: Specs, device: str, arch: str | None, allow_pickle: bool
) -> TorchEngine:
    """Open a file that `load_module` opens with `arch` and `inputs`.

    A program of torch.export states its inputs itself.
    """
    path = Path(source)
    own = path.is_file() and torch_kind(path) == "torch.export"
    loaded = load_module(path, arch=arch, inputs=() if own else inputs, allow_pickle=allow_pickle)
    return TorchEngine(loaded, path.name, device, None)


def describes_itself(path: Path) -> bool:
    """Return whether a file is a deploykit checkpoint. Raises BadInput for a damaged one."""
    try:
        return read(path, allow_pickle=False).source == "checkpoint"
    except RunsCode:
        return False


class TorchEngine(Engine):
    """The reference: PyTorch eager, float32; `bf16`: weights and float inputs rounded to that."""

    def __init__(
        self, loaded: Loaded, where: str, device: str, threads: int | None, *, bf16: bool = False
    ) -> None:
        cuda = torch.cuda.is_available()
        chosen = ("cuda" if cuda else "cpu") if device == "auto" else device
        chosen = "cuda:0" if chosen == "cuda" else chosen  # as tensors there call it
        if chosen != "cpu" and not cuda:
            raise Unsupported(
                f"{where}: device '{device}' was asked for, but torch sees no GPU",
                hint="see: deploykit doctor",
            )
        self.inputs, self.outputs = loaded.inputs, loaded.outputs
        self.runtime = f"torch {torch.__version__}"
        self.device = chosen
        self._where, self._guard = where, CallGuard(where)
        with module_errors(f"{where}: moving it to {chosen}"):
            self._module = loaded.module.to(chosen)
            self._floats = torch.bfloat16 if bf16 else None
            if bf16:
                self._module = self._module.to(torch.bfloat16)
        if threads is not None:
            torch.set_num_threads(threads)  # torch has one setting per process

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if self._module is None:
            raise DeploykitError(f"{self._where}: the engine is closed")
        self._guard.check_process()
        check_feeds(self.inputs, feeds, self._where)
        with module_errors(f"{self._where}: the model failed"):
            return self._run(feeds, self._floats)

    def _run(self, feeds: Arrays, floats: Any) -> dict[str, np.ndarray]:
        """Run the module on inputs whose floats have the type `floats`, None: that of the specs."""
        tensors = []
        for spec in self.inputs:  # copies, as a module may write to its inputs
            dtype = getattr(torch, spec.dtype)  # numpy lacks bfloat16
            dtype = floats if floats and dtype.is_floating_point else dtype
            array = np.require(feeds[spec.name], requirements=["C", "W"])
            tensors.append(torch.from_numpy(array).to(self.device, dtype, copy=True))
        with torch.inference_mode():
            values = [to_numpy(value).copy() for value in self._module(*tensors)]
        if len(values) != len(self.outputs):
            raise BadInput(
                f"{self._where}: the model returned {len(values)} tensors, "
                f"{len(self.outputs)} were announced: {', '.join(map(str, self.outputs))}"
            )
        return {spec.name: value for spec, value in zip(self.outputs, values, strict=True)}

    def in_float64(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs for `feeds` in float64. Raises BadInput if the model cannot."""
        held = [*self._module.parameters(), *self._module.buffers()]
        before = [(each, each.data) for each in held if each.is_floating_point()]
        with module_errors(f"{self._where}: in float64 the model failed"), torch.inference_mode():
            try:
                for tensor, data in before:
                    tensor.data = data.double()
                return self._run(feeds, torch.float64)
            finally:  # the same memory again
                for tensor, data in before:
                    tensor.data = data

    def modules(self) -> Iterator[tuple[str, Any]]:
        """Yield the model, named "(model)", and its modules by their names."""
        for name, part in self._module.named_modules():
            if name:
                yield name.removeprefix("module").lstrip(".") or "(model)", part

    def close(self) -> None:
        self._module = None


Key = tuple[str, str, str]
_COPIES = "inputs and outputs", "Engine", ""  # arrays to tensors and back


class LayerWatch:
    """Times the modules of `engine`, which it changes; `runs`: milliseconds by module per call.

    An operation that is not a module, such as an addition, counts for the module whose `forward`
    runs it. On a GPU calls are queued, so that these times do not measure them.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self.runs: list[Counter[Key]] = []
        self._inner_ns: list[int] = []  # time inside inner modules, for each running one
        self._call = self._timed(_COPIES, engine.__call__)
        for name, part in engine.modules():
            # wrap `forward`, as hooks would keep nn.TransformerEncoderLayer from its fast path
            if not isinstance(part, torch.jit.ScriptModule):
                part.forward = self._timed((name, type(part).__name__, ""), part.forward)

    def __call__(self, feeds: Arrays) -> Any:
        self.runs.append(Counter())
        self._inner_ns = [0]
        return self._call(feeds)

    def _timed(self, key: Key, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            begun = perf_counter_ns()
            self._inner_ns.append(0)
            try:
                return run(*args, **more)
            finally:
                taken_ns = perf_counter_ns() - begun
                own_ns = taken_ns - self._inner_ns.pop()
                self._inner_ns[-1] += taken_ns
                self.runs[-1][key] += own_ns / 1e6  # type: ignore[assignment]  # of floats

        return timed
