"""Keep the models' counters of the last ten minutes, so that the charts survive a reload.

A sample's `waiting` is the largest number since the last one: when it is taken, few may wait.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import orjson

from deploykit.serving.models.repository import ModelRepository

KEPT = 300
EVERY_US = 2_000_000


class _Sample(NamedTuple):
    at_us: int
    models: orjson.Fragment  # JSON: dicts would take six times the memory


class History:
    """The newest `KEPT` samples. Used on the event loop's thread only."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._samples: deque[_Sample] = deque(maxlen=KEPT)
        self._due_us = 0

    def tick(self, now_us: int) -> None:
        """Take a sample if one is due: about 10 µs per model, every 2 s."""
        if now_us < self._due_us:
            return
        self._due_us = now_us + EVERY_US
        models = [
            {"name": model.name, "waiting": model.take_most_waiting(), **model.metrics.status()}
            for model in self._repository.models.values()
        ]
        self._samples.append(_Sample(now_us, orjson.Fragment(orjson.dumps(models))))

    def since(self, at_us: int) -> list[dict[str, Any]]:
        """The samples after `at_us`, oldest first; `at_us` as in the samples."""
        return [sample._asdict() for sample in self._samples if sample.at_us > at_us]
