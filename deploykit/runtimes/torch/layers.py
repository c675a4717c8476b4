"""The time of each module of a PyTorch model in a call, without that of the modules inside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from deploykit.core.extras import require
from deploykit.runtimes.engine import Arrays
from deploykit.runtimes.torch.engine import TorchEngine

torch = require("torch")

Key = tuple[str, str, str]
_COPIES = "inputs and outputs", "Engine", ""  # from arrays to tensors and back


class LayerWatch:
    """Calls `engine`, whose modules it changes; `runs`: milliseconds by module of each call.

    What runs in no module, such as an addition, counts as the module's whose `forward` it is in. On
    a GPU calls are queued, and so are no times of these.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self.runs: list[Counter[Key]] = []
        self._inner_ns: list[int] = []  # of the modules inside each that runs
        self._call = self._timed(_COPIES, engine.__call__)
        for name, part in engine.modules():
            # `forward`, as hooks would keep nn.TransformerEncoderLayer from its fast path
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
