"""Keep the models' counters of the last ten minutes, so that the charts survive a reload."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import orjson

KEPT = 300
EVERY_US = 2_000_000

Samples = list[tuple[int, bytes]]  # the time in us, and the models as JSON


class History:
    """The newest `KEPT` samples. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, bytes]] = deque(maxlen=KEPT)

    def add(self, at_us: int, models: Sequence[dict[str, Any]]) -> None:
        """Add a sample: the counters of each model, by name."""
        self._samples.append((at_us, orjson.dumps(models)))  # dicts take six times the memory

    def since(self, at_us: int) -> Samples:
        """The samples after `at_us`, oldest first."""
        return [sample for sample in self._samples if sample[0] > at_us]


def with_history(status: dict[str, Any], samples: Samples) -> dict[str, Any]:
    """A status with the samples as its `history`, for orjson."""
    found = [{"at_us": at_us, "models": orjson.Fragment(models)} for at_us, models in samples]
    return {**status, "history_kept": KEPT, "history": found}
