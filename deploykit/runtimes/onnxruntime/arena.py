"""The memory that a session on the CPU keeps between runs. The module is passed in, for tests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from deploykit.runtimes.engine import Arrays

SHRINK_S = 10.0


class Arena:
    """When a session on the CPU gives unused memory back, which it would keep for ever.

    A run gives back what earlier ones left: the first one of each SHRINK_S, and one with larger
    inputs than those before it, which needs larger blocks. It costs the next runs new pages.
    """

    def __init__(self, ort: Any, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._until_s = -math.inf
        self._largest_bytes = 0
        self._shrink = ort.RunOptions()
        self._shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def options(self, feeds: Arrays, repeated: bool = False) -> Any:
        """The options of a run with these inputs; None for the usual ones.

        `repeated`: of the shapes of the run before.
        """
        now_s = self._clock_s()
        if repeated and now_s < self._until_s:
            return None
        size = sum([array.nbytes for array in feeds.values()])
        if size <= self._largest_bytes and now_s < self._until_s:
            return None
        self._until_s, self._largest_bytes = now_s + SHRINK_S, size
        return self._shrink
