"""Choose batch, delay and queue so that 99 of 100 requests are answered within `--slo-ms`.

In: how long batches took by their rows, how many rows arrive, and how many requests came too late.
Out: a BatchPolicy, anew each time `step` is called. Pure: the clock is passed in.

- **Batch.** Who comes just after a batch has begun waits for it and then for his own, so the batch
  is the largest with 2 t(rows) within the SLO: the rule of Nexus (Shen et al., SOSP 2019). t is
  what 19 of 20 batches keep to: a line through the sizes that were measured, times the pace of the
  machine now, times how far the times spread. Sizes just above the largest are tried as if they
  took no longer. Rows that make a batch at most a quarter longer than one row alone are always let
  in: without them it would be hardly sooner, and answer far fewer.
- **Queue.** With no bound no batch size holds an SLO under overload. As many rows may wait as go
  out in time, a batch in t, with one already running; more are refused at once (`Overloaded`) and
  can go elsewhere. Near the capacity that leaves, chance alone refuses some per cent.
- **Delay.** An idle engine waits only while that is likely to pay: if, at the present rate, a row
  more is expected within the time that running it apart would cost, 2 t(1) - t(2). It never waits
  longer than that time, so that it loses at most as much as it might have saved (the ski-rental
  bound; Karlin et al., 1988), nor longer than --max-delay-us if that is given, nor than the SLO
  leaves after two batches. Few requests, as a lone client's, never wait.
- **Correction.** t leaves out what happens between batches. When more than 1 in 100 requests are
  late all the same, the time that is reckoned with is cut by a tenth, and given back in growing
  steps while they are in time: additive increase, multiplicative decrease, as in Clipper
  (Crankshaw et al., NSDI 2017). It is never cut below three quarters of the SLO: what is late then
  is late because of something else, and smaller batches would only answer fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploykit.serving.batching.policy import BatchPolicy, Pending

_LATE_SHARE = 0.01
_QUANTILE = 0.95
_WIDEST = 1.5  # spread that is reckoned with
_CHEAP = 1.25  # times that of one row
_STEP = 1.25  # from the largest size that was measured to one that is tried
_WEIGHT = 0.1  # of the newest batch in the pace of all sizes
_SHAPE_WEIGHT = 0.02  # and in that of its own size
_ODD = 0.5  # what is farther off counts as no farther: somebody else had the machine
_SPREAD_PACE = 0.02
_FORGET_US = 30_000_000  # a batch size not run for so long is tried again
_SHORTEST_DELAY_US = 100  # a thread's sleep is no finer
_ENOUGH = 100  # requests to judge by
_JUDGE_US = 1_000_000  # and time
_RATE_US = 500_000  # the arrival rate is a mean over about this long
_MOST, _LEAST = 0.95, 0.75  # of the share of the SLO that is reckoned with
_DOWN, _UP, _FASTER = 0.9, 0.005, 1.5


@dataclass
class _Measured:
    """Batches of about `rows` rows take some `us` where the pace is 1."""

    rows: float
    us: float
    seen_us: int


class Steering:
    """Steers one model of `engines` engines. `base` holds what must not be exceeded."""

    def __init__(self, slo_us: int, base: BatchPolicy, engines: int = 1) -> None:
        self._slo_us = slo_us
        self._base = base
        self._engines = engines
        self._measured: dict[int, _Measured] = {}
        self._pace = 1.0  # of the machine now: it slows down or speeds up all sizes
        self._spread = 1.0  # of the times around their mean
        self._share = _MOST
        self._up = _UP
        self._judged_us = 0
        self._requests = self._late = 0
        self._rate = 0.0  # rows per µs
        self._last: tuple[int, int] | None = None

    def measured(self, rows: int, busy_us: int, now_us: int) -> None:
        """A batch of `rows` took `busy_us`."""
        rows, busy_us = max(1, rows), max(1, busy_us)
        known = self._measured.get(_size_class(rows))
        if known is None:
            self._measured[_size_class(rows)] = _Measured(rows, busy_us / self._pace, now_us)
            return
        off = busy_us / (self._pace * self._mean_us(rows)) - 1
        step = _SPREAD_PACE * ((1 + off > self._spread) - (1 - _QUANTILE))
        self._spread = min(max(1.0, self._spread * (1 + step)), _WIDEST)
        self._pace *= 1 + _WEIGHT * max(-_ODD, min(_ODD, off))
        known.us *= 1 + _SHAPE_WEIGHT * max(-_ODD, min(_ODD, off))
        known.rows += _SHAPE_WEIGHT * (rows - known.rows)
        known.seen_us = now_us

    def ran(self, batch: Sequence[Pending], started_us: int, ended_us: int) -> None:
        """A batch was run well; its requests are about to be answered."""
        self.measured(sum([r.rows for r in batch]), ended_us - started_us, ended_us)
        in_time_us = ended_us - self._slo_us
        self._requests += len(batch)
        self._late += sum([r.arrived_us - r.decode_us < in_time_us for r in batch])

    def step(self, now_us: int, added_rows: int) -> BatchPolicy:
        """What holds from now on. `added_rows`: all that ever arrived."""
        self._see_rate(now_us, added_rows)
        if not self._measured:
            return self._base
        self._correct(now_us)
        budget_us = self._slo_us * self._share
        rows = self._largest(max(budget_us / 2, _CHEAP * self.time_us(1)))
        self._forget(rows, now_us)
        batch_us = self.time_us(rows)
        waves = max(1, int(budget_us / batch_us) - 1)
        return replace(
            self._base,
            max_batch=min(rows, self._base.max_batch),
            max_delay_us=self._delay_us(budget_us - 2 * batch_us) if rows > 1 else 0,
            queue_rows=waves * rows * self._engines,
        )

    def time_us(self, rows: float) -> float:
        """What nearly every batch of `rows` rows keeps to."""
        return self._mean_us(rows) * self._pace * self._spread

    def _mean_us(self, rows: float) -> float:
        points = sorted(self._measured.values(), key=lambda point: point.rows)
        below = None
        for point in points:
            if point.rows >= rows:
                if below is None:
                    return point.us
                share = (rows - below.rows) / (point.rows - below.rows)
                return below.us + share * (point.us - below.us)
            below = point
        last = points[-1]
        return last.us * (rows / last.rows if rows > _STEP * last.rows + 1 else 1)

    def _largest(self, limit_us: float) -> int:
        """The most rows whose batch takes `limit_us` or less; at least 1."""
        low, high = 1, max(1, self._base.max_batch)
        while low < high:
            middle = (low + high + 1) // 2
            if self.time_us(middle) <= limit_us:
                low = middle
            else:
                high = middle - 1
        return low

    def _forget(self, rows: int, now_us: int) -> None:
        """Sizes above those in use are not measured any more: what they took may have changed."""
        for key, point in list(self._measured.items()):
            old = now_us - point.seen_us > _FORGET_US
            if (
                old
                and point.rows > rows
                and any(other.rows <= rows for other in self._measured.values())
            ):
                del self._measured[key]

    def _delay_us(self, slack_us: float) -> int:
        saved_us = max(0.0, 2 * self.time_us(1) - self.time_us(2))
        if self._rate * saved_us < 1:
            return 0
        delay_us = int(min(saved_us, slack_us, self._base.max_delay_us or saved_us))
        return delay_us if delay_us >= _SHORTEST_DELAY_US else 0

    def _correct(self, now_us: int) -> None:
        if self._requests < _ENOUGH or now_us - self._judged_us < _JUDGE_US:
            return
        self._judged_us = now_us
        if self._late > self._requests * _LATE_SHARE:
            self._share, self._up = max(_LEAST, self._share * _DOWN), _UP
        else:
            self._share, self._up = min(_MOST, self._share + self._up), self._up * _FASTER
        self._requests = self._late = 0

    def _see_rate(self, now_us: int, added_rows: int) -> None:
        if self._last is not None and now_us > self._last[0]:
            passed_us = now_us - self._last[0]
            weight = min(1.0, passed_us / _RATE_US)
            self._rate += weight * ((added_rows - self._last[1]) / passed_us - self._rate)
        self._last = (now_us, added_rows)


def _size_class(rows: int) -> int:
    """Four classes from each power of two to the next."""
    power = rows.bit_length() - 1
    return 4 * power + 4 * (rows - (1 << power)) // (1 << power)
