"""Where the time of a call goes, layer by layer, by the profiler of an engine's runtime."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from deploykit.core.errors import DeploykitError
from deploykit.measure.layers import LayerKey, LayerTime, LayerTimes, middle
from deploykit.runtimes.engine import Arrays, Engine

_LENGTH_S, _FEWEST, _MOST, _WARM, _TURNS = 1.0, 8, 200, 3, 4  # of the calls on each side
Read = Callable[[], Sequence[Counter[LayerKey]]]


def time_layers(
    what: tuple[str, int],
    engines: tuple[Engine, Callable[[Arrays], object]],
    feeds: Arrays,
    read: Read,
) -> LayerTimes:
    """`what`: label and batch. `engines`: without and with a profiler; `read`: ms of its calls."""
    plain_s, profiled_s = _take_turns(*(partial(engine, feeds) for engine in engines))
    runs = [run for run in read()[-len(profiled_s) :] if run]
    if not runs:
        raise DeploykitError(f"{what[0]}: its profile holds no whole call")
    found = [  # each for itself: where other work stops a call, it stops it in one layer
        LayerTime(key[0], key[1], _mean([run[key] for run in runs]))
        for key in dict.fromkeys(key for run in runs for key in run)
    ]
    call_ms, with_ms = (1e3 * _mean(seconds) for seconds in (plain_s, profiled_s))
    top = tuple(sorted(found, key=lambda each: -each.ms))
    whole = call_ms, with_ms, math.fsum(each.ms for each in found)
    return LayerTimes(*what, engines[0].runtime, len(profiled_s), *whole, len(found), top)


def _mean(values: Sequence[float]) -> float:
    return fmean(values[at] for at in middle(values))


def _take_turns(*sides: Callable[[], object]) -> tuple[list[float], ...]:
    """Seconds of calls in turns; of a few each, as threads that spin after one slow the next."""
    once_s = [max(map(_time, sides)) for _ in range(_WARM)][-1]
    each = math.ceil(max(_FEWEST, min(_MOST, _LENGTH_S / once_s)) / _TURNS)
    found: tuple[list[float], ...] = tuple([] for _ in sides)
    for _ in range(_TURNS):
        for calls_s, call in zip(found, sides, strict=True):
            calls_s += [_time(call) for _ in range(each)]
    return found


def _time(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
