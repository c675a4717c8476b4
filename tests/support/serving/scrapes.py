"""What `/metrics` answers, without a server."""

from __future__ import annotations

from collections.abc import Iterable

from deploykit.serving.observe.metrics import Sample, expositions


def exposition(samples: Iterable[Sample], accept: str = "") -> tuple[bytes, str]:
    """For one Accept header: the text and its content type."""
    return expositions(samples, [accept])[accept]
