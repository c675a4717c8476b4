"""Run MLPerf's scenarios on the setups that were fastest in the sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from deploykit.api.artefacts import Progress
from deploykit.core.errors import BadInput

if TYPE_CHECKING:
    from deploykit.measure.timing.scenarios import ScenarioResult
    from deploykit.measure.timing.sweep import Point, Setup
    from deploykit.runtimes.engine import Arrays


def choose_scenarios(
    names: Sequence[str], seconds: float, slo_ms: float | None
) -> Callable[..., list[ScenarioResult]]:
    """`run_scenarios` of these; raises BadInput for no such name, a server without its bound."""
    from deploykit.measure.timing.scenarios import SCENARIOS, SERVER

    for name in names:
        if name not in SCENARIOS:
            raise BadInput(
                f"`scenario` {name}: no such scenario", hint=f"one of: {', '.join(SCENARIOS)}"
            )
    if SERVER in names and slo_ms is None:
        raise BadInput(
            "`scenario` server needs `slo_ms`, the bound of p99",
            hint="`slo_ms` 15",
        )
    return partial(run_scenarios, names, seconds=seconds, slo_ms=slo_ms)


def run_scenarios(
    names: Sequence[str],
    *,
    setups: Sequence[Setup],
    points: Sequence[Point],
    seconds: float,
    slo_ms: float | None,
    feeds: Callable[[int], Arrays],
    on_progress: Progress | None = None,
) -> list[ScenarioResult]:
    """Each scenario on each file and device, in the settings that were fastest for it.

    `points`: of `setups`. `feeds(n)`: inputs of n samples. An engine that takes no query of the
    scenario's size has a result without a value.
    """
    return [
        _run(name, setup, batch, seconds, slo_ms, feeds, on_progress)
        for name in dict.fromkeys(names)
        for setup, batch in _fastest(name, setups, points)
    ]


def _fastest(
    name: str, setups: Sequence[Setup], points: Sequence[Point]
) -> list[tuple[Setup, int]]:
    """By file and device, of the setups that fit the scenario, at the batch size nearest to it."""
    from deploykit.measure.timing.scenarios import OFFLINE, SAMPLES, SERVER

    one_call = [
        (point, setup)
        for point in points
        for setup in setups
        if (setup.label, setup.in_flight) == (point.label, 1)
        and point.batch in (setup.batches or (point.batch,))
        and (name in (OFFLINE, SERVER) or setup.sessions == 1)
        and not (name == SERVER and setup.processes)
    ]
    found: dict[tuple[str, str], tuple[tuple[int, float], Setup, int]] = {}
    for point, setup in one_call:
        away = 0 if name == OFFLINE else abs(point.batch - SAMPLES[name])
        rank = (away, -point.throughput_per_s.value)
        key = (setup.file, point.device)
        if key not in found or rank < found[key][0]:
            found[key] = (rank, setup, point.batch)
    return [(setup, SAMPLES.get(name, batch)) for _, setup, batch in found.values()]


def _run(
    name: str,
    setup: Setup,
    batch: int,
    seconds: float,
    slo_ms: float | None,
    feeds: Callable[[int], Arrays],
    on_progress: Progress | None,
) -> ScenarioResult:
    from deploykit.measure.timing import scenarios

    if on_progress is not None:
        on_progress(f"{setup.label}: {name}", 1.0)
    with ExitStack() as stack:
        engines = [stack.enter_context(setup.engines()) for _ in range(setup.sessions)]
        subject = scenarios.Subject(setup.label, setup.precision, setup.settings, engines)
        inputs, given = engines[0].inputs, feeds(batch)
        fixed = inputs[0].shape[0] if inputs and inputs[0].shape else batch
        most = engines[0].max_batch or batch
        if batch > most or (isinstance(fixed, int) and fixed != batch):
            why = f"it takes no query of {batch} samples"
            return scenarios.refused(name, subject, batch, why)
        if name == scenarios.OFFLINE:
            return scenarios.run_offline(subject, given, batch, seconds)
        if slo_ms is not None and name == scenarios.SERVER:
            return scenarios.run_server(subject, given, slo_ms, seconds)
        return scenarios.run_stream(name, subject, given, seconds)
