"""The figures for the dashboard: counters since the start, and their recent samples.

A sample's `waiting` is the largest number since the last one: when it is taken, few may wait.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import orjson

from deploykit import __version__
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.metrics import REQUEST_US

KEPT = 300
EVERY_US = 2_000_000

Samples = list[tuple[int, bytes]]  # pairs of the time in µs and the models as JSON


class History:
    """The newest `KEPT` samples, which let charts survive a reload. Not thread-safe."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, bytes]] = deque(maxlen=KEPT)

    def add(self, at_us: int, models: Sequence[dict[str, Any]]) -> None:
        """Add a sample: the counters of each model, by name."""
        self._samples.append((at_us, orjson.dumps(models)))  # dicts take six times the memory

    def since(self, at_us: int) -> Samples:
        """Return the samples after `at_us`, oldest first."""
        return [sample for sample in self._samples if sample[0] > at_us]


def write_status(status: dict[str, Any], samples: Samples) -> bytes:
    """Write a status as JSON, with the samples as its `history`."""
    found = [{"at_us": at_us, "models": orjson.Fragment(models)} for at_us, models in samples]
    return orjson.dumps({**status, "history_kept": KEPT, "history": found})


def since_us(query: str) -> int:
    """Parse `since=N` of a query, the time after which samples are wanted; without it, none."""
    since = parse_qs(query).get("since", [""])[0]
    return int(since) if re.fullmatch(r"[0-9]{1,18}", since) else 1 << 60


class Status:
    """Collects the figures of this process, in about 20 µs per model, without waiting."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self.history = History()
        self._due_us = 0

    def tick(self, now_us: int) -> None:
        """Add a sample to the history if one is due: about 10 µs per model, every 2 s."""
        if now_us < self._due_us:
            return
        self._due_us = now_us + EVERY_US
        counts, waiting = self.counts(), self.most_waiting()
        models = [{"name": name, **counts[name], "waiting": waiting[name]} for name in counts]
        self.history.add(now_us, models)

    def counts(self) -> dict[str, dict[str, Any]]:
        """Return the counters by model."""
        repository = self._repository
        counts = {name: each.counted() for name, each in repository.pipelines.items()}
        return counts | {name: each.metrics.status() for name, each in repository.models.items()}

    def most_waiting(self) -> dict[str, int]:
        """Return, by model, the most requests that waited since the last call."""
        repository = self._repository
        most = {name: each.waiting for name, each in repository.pipelines.items()}
        return most | {name: each.take_most_waiting() for name, each in repository.models.items()}

    def now(self) -> dict[str, Any]:
        """Return totals since the start, times in µs: two responses give the rates between them."""
        repository, sample = self._repository, self._repository.sampler.latest()
        process = {**sample.process, "at_s": sample.at_s} if sample and sample.process else None
        return {
            "version": __version__,
            "at_us": time.monotonic_ns() // 1000,
            "at_s": time.time(),
            "not_ready": repository.why_not_ready(),
            "process": process,
            "gpus": [gpu.to_dict() for gpu in sample.gpus] if sample else [],
            "buckets_us": REQUEST_US,
            "models": [
                {
                    **(self._model(each) if isinstance(each, ServedModel) else each.status()),
                    "not_ready": repository.why_not_ready(each),
                }
                for each in repository.served.values()
            ],
        }

    def _model(self, model: ServedModel) -> dict[str, Any]:
        metadata, policy = model.metadata(), model.batcher.policy
        return {
            "name": model.name,
            "platform": metadata["platform"],
            "device": model.engines[0].device,
            "runtime": model.engines[0].runtime,
            "engines": model.batcher.engines,
            "max_batch": model.max_batch,
            "batch_limit": policy.max_batch,
            "delay_us": policy.max_delay_us,
            "queue": policy.queue,
            "notes": list(model.notes),
            "task": model.task.facts,
            **model.in_use._asdict(),
            "inputs": metadata["inputs"],
            "outputs": metadata["outputs"],
            "waiting": model.waiting,
            "in_flight": model.unanswered,
            **model.metrics.status(),
        }
