"""What the page at `/` shows: the counters as they are, in one JSON value.

In: a Service. Out: plain numbers since the start, times in µs; whoever looks twice has the rates.
"""

from __future__ import annotations

import time
from typing import Any

from deploykit import __version__
from deploykit.core.json_value import json_value
from deploykit.serving.models.repository import ServedModel, Service
from deploykit.serving.observe.metrics import REQUEST_US


def status(service: Service) -> dict[str, Any]:
    """The answer to GET /status; takes some 20 µs a model and waits for nothing."""
    sample = service.sampler.latest()
    return {
        "version": __version__,
        "at_us": time.monotonic_ns() // 1000,
        "at_s": time.time(),
        "not_ready": service.why_not_ready(),
        "process": json_value(sample.process) if sample else None,
        "gpus": [gpu.to_dict() for gpu in sample.gpus] if sample else [],
        "buckets_us": REQUEST_US,
        "models": [_model(service, model) for model in service.models.values()],
    }


def _model(service: Service, model: ServedModel) -> dict[str, Any]:
    metadata = model.metadata()
    policy = model.batcher.policy
    return {
        "name": model.name,
        "platform": metadata["platform"],
        "device": model.engines[0].device,
        "engines": len(model.engines),
        "max_batch": model.max_batch,
        "batch_limit": policy.max_batch,
        "delay_us": policy.max_delay_us,
        "queue": service.options.queue,
        "notes": list(model.notes),
        "not_ready": service.why_not_ready(model),
        "inputs": metadata["inputs"],
        "outputs": metadata["outputs"],
        "waiting": model.waiting,
        "in_flight": model.unanswered,
        **model.metrics.status(),
    }
