"""Adapt batch size, delay and queue so that 99 % of the requests are answered within `slo_ms`.

`step` computes a BatchPolicy from the batch times, the arrival rate and the share of late requests.
Pure: the clock is passed in.

- **Batch size.** A request that arrives just after a batch started waits for that batch and then
  for its own, so the size is the largest with 2 t(rows) within the SLO, as in Nexus (Shen et al.,
  SOSP 2019). t is the 95th percentile of the batch time: interpolated between measured sizes,
  times the current pace of the machine, times the spread. Sizes slightly above the largest measured
  one are assumed to take no longer. Rows that make a batch at most 25 % longer than a single row
  are always accepted: without them latency would hardly improve, and throughput would drop.
- **Queue.** Without a bound, no batch size meets an SLO under overload. Only as many rows may wait
  as can be answered in time behind a running batch; more are refused at once (`Overloaded`). Close
  to capacity, random arrivals alone cause some per cent of refusals.
- **Delay.** An idle engine waits only if, at the current rate, another row is expected within the
  time that batching it would save, 2 t(1) - t(2). The delay never exceeds that time, so waiting
  costs at most what it could have saved (the ski-rental bound; Karlin et al., 1988), nor
  `max_delay_us` if set, nor what the SLO leaves after two batches. A single client never waits.
- **Correction.** t excludes the time between batches. While more than 1 % of the requests are late,
  the budget is cut by a tenth, else it recovers in growing steps: additive increase, multiplicative
  decrease, as in Clipper (Crankshaw et al., NSDI 2017). It stays above three quarters of the SLO:
  below that, batches are not the cause, and smaller ones would only reduce throughput.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploykit.serving.batching.queue import BatchPolicy, Pending

_LATE_SHARE = 0.01
_QUANTILE = 0.95
_MAX_SPREAD = 1.5
_CHEAP = 1.25  # a batch may always take this many times the time of one row
_STEP = 1.25  # the factor from the largest measured size to the next one to try
_WEIGHT = 0.1  # the weight of a batch in the pace of all sizes
_SHAPE_WEIGHT = 0.02  # the weight of a batch in the time of its own size
_ODD = 0.5  # larger deviations are clipped: other programs used the machine
_SPREAD_PACE = 0.02
_FORGET_US = 30_000_000  # a batch size that did not run for this long is tried again
_SHORTEST_DELAY_US = 100  # a thread's sleep is no finer
_MIN_REQUESTS = 100  # requests needed for a correction
_CORRECT_US = 1_000_000  # between corrections
_RATE_US = 500_000  # the arrival rate is a mean over about this long
_MOST, _LEAST = 0.95, 0.75  # the limits of the budget, as shares of the SLO
_DOWN, _UP, _FASTER = 0.9, 0.005, 1.5


@dataclass
class _Measured:
    """The time of batches of about `rows` rows: about `us` at pace 1."""

    rows: float
    us: float
    seen_us: int


class Steering:
    """Adapts the policy of one model with `engines` engines. `base`: the upper limits."""

    def __init__(self, slo_us: int, base: BatchPolicy, engines: int = 1) -> None:
        self._slo_us = slo_us
        self._base = base
        self._engines = engines
        self._measured: dict[int, _Measured] = {}
        self._pace = 1.0  # current slowdown of the machine, common to all sizes
        self._spread = 1.0  # 95th percentile over the mean
        self._share = _MOST
        self._up = _UP
        self._corrected_us = 0
        self._requests = self._late = 0
        self._rate = 0.0  # rows per µs
        self._last: tuple[int, int] | None = None

    def record_time(self, rows: int, busy_us: int, now_us: int) -> None:
        """Update the time of a size: a batch of `rows` rows took `busy_us`."""
        rows, busy_us = max(1, rows), max(1, busy_us)
        known = self._measured.get(_size_class(rows))
        if known is None:
            self._measured[_size_class(rows)] = _Measured(rows, busy_us / self._pace, now_us)
            return
        off = busy_us / (self._pace * self._mean_us(rows)) - 1
        step = _SPREAD_PACE * ((1 + off > self._spread) - (1 - _QUANTILE))
        self._spread = min(max(1.0, self._spread * (1 + step)), _MAX_SPREAD)
        self._pace *= 1 + _WEIGHT * max(-_ODD, min(_ODD, off))
        known.us *= 1 + _SHAPE_WEIGHT * max(-_ODD, min(_ODD, off))
        known.rows += _SHAPE_WEIGHT * (rows - known.rows)
        known.seen_us = now_us

    def record_run(self, batch: Sequence[Pending], started_us: int, ended_us: int) -> None:
        """Record a batch that succeeded and whose requests are about to be answered."""
        self.record_time(sum([r.rows for r in batch]), ended_us - started_us, ended_us)
        in_time_us = ended_us - self._slo_us
        self._requests += len(batch)
        self._late += sum([r.arrived_us - r.decode_us < in_time_us for r in batch])

    def step(self, now_us: int, added_rows: int) -> BatchPolicy:
        """Return the policy from now on. `added_rows`: the rows that have arrived in total."""
        if self._last is not None and now_us > self._last[0]:
            passed_us = now_us - self._last[0]
            weight = min(1.0, passed_us / _RATE_US)
            self._rate += weight * ((added_rows - self._last[1]) / passed_us - self._rate)
        self._last = (now_us, added_rows)
        if not self._measured:
            return self._base
        self._correct(now_us)
        budget_us = self._slo_us * self._share
        rows = self._largest(max(budget_us / 2, _CHEAP * self.time_us(1)))
        for key, point in list(self._measured.items()):
            # old times of sizes above those in use: they may have changed
            old = now_us - point.seen_us > _FORGET_US and point.rows > rows
            if old and any(other.rows <= rows for other in self._measured.values()):
                del self._measured[key]
        batch_us = self.time_us(rows)
        waves = max(1, int(budget_us / batch_us) - 1)
        return replace(
            self._base,
            max_batch=min(rows, self._base.max_batch),
            max_delay_us=self._delay_us(budget_us - 2 * batch_us) if rows > 1 else 0,
            queue_rows=waves * rows * self._engines,
        )

    def time_us(self, rows: float) -> float:
        return self._mean_us(rows) * self._pace * self._spread

    def _mean_us(self, rows: float) -> float:
        points = sorted(self._measured.values(), key=lambda point: point.rows)
        at, last = bisect_left(points, rows, key=lambda point: point.rows), points[-1]
        if at == len(points):
            return last.us * (rows / last.rows if rows > _STEP * last.rows + 1 else 1)
        below, above = points[max(0, at - 1)], points[at]
        share = (rows - below.rows) / (above.rows - below.rows) if at else 0
        return below.us + share * (above.us - below.us)

    def _largest(self, limit_us: float) -> int:
        sizes = range(1, self._base.max_batch + 1)
        return max(1, bisect_right(sizes, limit_us, key=self.time_us))

    def _delay_us(self, slack_us: float) -> int:
        saved_us = max(0.0, 2 * self.time_us(1) - self.time_us(2))
        if self._rate * saved_us < 1:
            return 0
        delay_us = int(min(saved_us, slack_us, self._base.max_delay_us or saved_us))
        return delay_us if delay_us >= _SHORTEST_DELAY_US else 0

    def _correct(self, now_us: int) -> None:
        if self._requests < _MIN_REQUESTS or now_us - self._corrected_us < _CORRECT_US:
            return
        self._corrected_us = now_us
        if self._late > self._requests * _LATE_SHARE:
            self._share, self._up = max(_LEAST, self._share * _DOWN), _UP
        else:
            self._share, self._up = min(_MOST, self._share + self._up), self._up * _FASTER
        self._requests = self._late = 0


def _size_class(rows: int) -> int:
    """Return the class of a batch size; each power of two has four classes up to the next."""
    power = rows.bit_length() - 1
    return 4 * power + 4 * (rows - (1 << power)) // (1 << power)
