"""Adapt batch size, delay and queue so that 99 % of the requests are answered within `slo_ms`.

`step` computes a BatchPolicy from the batch times and the share of late requests. Pure: the clock
is passed in.

- **Batch size.** A request that arrives just after a batch started waits for that batch and then
  for its own, so the size is the largest with 2 t(rows) within the SLO, as in Nexus (Shen et al.,
  SOSP 2019). t is interpolated between measured sizes; sizes slightly above the largest one are
  assumed to take no longer. Rows that make a batch at most 25 % longer than a single row are always
  accepted: without them latency would hardly improve, and throughput would drop.
- **Queue.** Without a bound, no batch size meets an SLO under overload. Only as many rows may wait
  as can be answered in time behind a running batch; more are refused at once (`Overloaded`). Close
  to capacity, random arrivals alone cause some per cent of refusals.
- **Delay.** `max_delay_us`, but no more than the SLO leaves after two batches.
- **Correction.** Batch times vary, and t excludes the time between batches. While more than 1 % of
  the requests are late, the budget is cut by a tenth, else it recovers slowly: additive increase,
  multiplicative decrease, as in Clipper (Crankshaw et al., NSDI 2017). It has a lower bound, below
  which batches are not the cause, and smaller ones would only reduce throughput.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from deploykit.serving.batching.queue import BatchPolicy, Pending

_LATE_SHARE = 0.01
_CHEAP = 1.25  # a batch may always take this many times the time of one row
_STEP = 1.25  # the factor from the largest measured size to the next one to try
_WEIGHT, _OWN_WEIGHT = 0.1, 0.15  # of a batch in the times of all sizes, and of its own
_ODD = 0.5  # larger deviations are clipped: other programs used the machine
_FORGET_US = 30_000_000  # after so long a larger batch is tried again: it may have been slow once
_MIN_REQUESTS = 100  # requests needed for a correction
_CORRECT_US = 1_000_000  # between corrections
_MOST, _LEAST = 0.95, 0.65  # the limits of the budget, as shares of the SLO
_DOWN, _UP = 0.9, 0.005


class Steering:
    """Adapts the policy of one model with `engines` engines. `base`: the upper limits."""

    def __init__(self, slo_us: int, base: BatchPolicy, engines: int = 1) -> None:
        self._slo_us = slo_us
        self._base = base
        self._engines = engines
        self._us: dict[int, float] = {}  # the time of batches, by rows, ascending
        self._share = _MOST
        self._corrected_us = self._forgot_us = 0
        self._requests = self._late = 0

    def record_time(self, rows: int, busy_us: int) -> None:
        """Update the times: a batch of `rows` rows took `busy_us`."""
        rows, busy_us = max(1, rows), max(1, busy_us)
        if rows > max(self._us, default=0):
            self._us[rows] = busy_us
            return
        off = max(-_ODD, min(_ODD, busy_us / self.time_us(rows) - 1))
        nearest = min(self._us, key=lambda size: abs(size - rows))
        for size in self._us:
            self._us[size] *= 1 + (_OWN_WEIGHT if size == nearest else _WEIGHT) * off

    def record_run(self, batch: Sequence[Pending], started_us: int, ended_us: int) -> None:
        """Record a batch that succeeded and whose requests are about to be answered."""
        self.record_time(sum([r.rows for r in batch]), ended_us - started_us)
        in_time_us = ended_us - self._slo_us
        self._requests += len(batch)
        self._late += sum([r.arrived_us - r.decode_us < in_time_us for r in batch])

    def step(self, now_us: int) -> BatchPolicy:
        """Return the policy from now on."""
        if not self._us:
            return self._base
        if self._requests >= _MIN_REQUESTS and now_us - self._corrected_us >= _CORRECT_US:
            late = self._late > self._requests * _LATE_SHARE
            share = self._share * _DOWN if late else self._share + _UP
            self._share = max(_LEAST, min(_MOST, share))
            self._corrected_us, self._requests, self._late = now_us, 0, 0
        budget_us = self._slo_us * self._share
        limit_us = max(budget_us / 2, _CHEAP * self.time_us(1))
        sizes = range(1, self._base.max_batch + 1)
        rows = max(1, bisect_right(sizes, limit_us, key=self.time_us))
        batch_us = self.time_us(rows)
        if now_us - self._forgot_us > _FORGET_US:
            self._forgot_us, least = now_us, min(self._us)
            self._us = {size: us for size, us in self._us.items() if size <= max(rows, least)}
        waves = max(1, int(budget_us / batch_us) - 1)
        slack_us = max(0, int(budget_us - 2 * batch_us)) if rows > 1 else 0
        return replace(
            self._base,
            max_batch=min(rows, self._base.max_batch),
            max_delay_us=min(self._base.max_delay_us, slack_us),
            queue_rows=waves * rows * self._engines,
        )

    def time_us(self, rows: int) -> float:
        sizes = list(self._us)
        at, last = bisect_left(sizes, rows), sizes[-1]
        if at == len(sizes):
            return self._us[last] * (rows / last if rows > _STEP * last + 1 else 1)
        below, above = sizes[max(0, at - 1)], sizes[at]
        share = (rows - below) / (above - below) if at else 0
        return self._us[below] + share * (self._us[above] - self._us[below])
