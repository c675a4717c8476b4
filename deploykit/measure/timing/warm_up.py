"""Call an engine until its calls no longer speed up, and tell a rate that still rises.

The first calls pay for lazy loading, page faults, rising clocks and compilers that run meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deploykit.measure.timing.closed_loop import Block

_WINDOWS = 10  # in the limit
_LAST = 4  # windows that have to agree, within 10 % as perf_analyzer asks, and without a trend
_STABLE = 1.10
_TREND = 0.01  # rise of the rate from window to window
_MORE = 3  # times the limit for calls that still speed up
_RISEN, _SURE = 0.05, 6.0  # over the rounds, and in standard errors


@dataclass(frozen=True)
class Warmth:
    """`call_s`: seconds of the longest call in the last window, 0 without a warm-up.

    `note`: a caveat, or "". `mark`: why the calls after it say nothing for a steady state, or "".
    """

    note: str = ""
    mark: str = ""
    call_s: float = 0.0


def warm_up(run: Callable[[float], Block], limit_s: float) -> Warmth:
    """Run windows until the last four agree within 10 % and do not rise by 1 % a window.

    At most `limit_s`, or three times that where calls speed up. `run` calls the engine for so many
    seconds.
    """
    if limit_s == 0:
        return Warmth("no warm-up")
    rates: list[float] = []
    spent_s = 0.0
    while True:
        block = run(limit_s / _WINDOWS)
        spent_s += block.seconds
        rates.append(block.rate)
        call_s = float(block.calls_ns.max()) / 1e9
        last = rates[-_LAST:]
        rise = _rise(last)
        if len(last) == _LAST and max(last) <= _STABLE * min(last) and rise < _TREND:
            return Warmth(call_s=call_s)
        if spent_s >= _MORE * limit_s and len(last) == _LAST and rise >= _TREND:
            still = f"still {rise:.0%} faster every {limit_s / _WINDOWS:g} s after "
            text = f"{still}{_MORE * limit_s:g} s of warm-up: a longer one is needed"
            return Warmth(mark=text, call_s=call_s)
        if spent_s >= limit_s and (len(last) < _LAST or rise < _TREND):
            return Warmth(f"not yet steady after {limit_s:g} s of warm-up", call_s=call_s)


def rose(rates: Sequence[float]) -> str:
    """Why these rates of rounds, in order of time, are not those of a steady state, or "".

    They rise by 5 % or more, on a line that noise does not explain. Fewer than five say nothing.
    """
    n = len(rates)
    if n < 5:
        return ""
    slope, logs = _rise(rates), np.log(rates)
    place = np.arange(n) - (n - 1) / 2
    left = logs - logs.mean() - slope * place
    error = math.sqrt(float((left**2).sum()) / (n - 2) / float((place**2).sum()))
    risen = math.expm1(slope * (n - 1))
    if risen < _RISEN or slope < _SURE * error:
        return ""
    return f"calls still sped up, by {risen:.0%} over the rounds: a longer warm-up is needed"


def _rise(rates: Sequence[float]) -> float:
    """The slope of the logarithms' least-squares line: 0.03 where each is 3 % above the last."""
    if len(rates) < 2:
        return 0.0
    place = np.arange(len(rates)) - (len(rates) - 1) / 2
    return float((place * np.log(rates)).sum() / (place**2).sum())
