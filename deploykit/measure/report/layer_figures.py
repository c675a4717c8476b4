"""The layers of a call as a table and as a chart, and whether their times add up to the call."""

from __future__ import annotations

from deploykit.measure.report.canvas import short
from deploykit.measure.report.chart import Bars
from deploykit.measure.report.formatting import MISSING, SPACE, count, number
from deploykit.measure.report.rows import Json, after_setups

COLUMNS = ("layer", "operator", "ms", "share", "GFLOP/s", "of ceiling")
_DRAWN = 15
_ADDS_UP = 0.05  # of a call, which the sum of its layers may be off


def layer_rows(found: Json, most: int | None = None) -> list[tuple[str, ...]]:
    """Of a LayerTimes in JSON: those that take most, then the others in one row."""
    rows, whole, rest_ms = list[tuple[str, ...]](), found["sum_ms"], found["sum_ms"]
    for each in found["layers"][:most]:
        ms, gflops = each["ms"], each["gflops"]
        rate = number(gflops) if gflops else MISSING
        reached = _share(gflops or 0.0, gflops and found["ceilings"].get(each["precision"]))
        rows.append((each["name"], each["op"], number(ms), _share(ms, whole), rate, reached))
        rest_ms = max(0.0, rest_ms - ms)
    if others := found["count"] - len(rows):
        rest = MISSING, number(rest_ms), _share(rest_ms, whole), MISSING, MISSING
        rows.append((f"{count(others)} others", *rest))
    return rows


def _share(part: float, whole: float | None) -> str:
    return f"{number(100 * part / whole)}{SPACE}%" if whole else MISSING


def layer_note(found: Json) -> str:
    """How far the layers add up to a call, and what to think of it."""
    share = found["sum_ms"] / found["call_ms"]
    call, profiled = (number(found[key]) for key in ("call_ms", "profiled_ms"))
    more_us = 1e3 * (found["profiled_ms"] - found["call_ms"]) / (found["count"] or 1)
    text = (
        f"{found['label']} at batch {found['batch']}, {found['runtime']}, {found['calls']} calls: "
        f"{count(found['count'])} layers add up to {_share(share, 1)} of a call of {call}{SPACE}ms "
        f"without the profiler, with which one takes {profiled}{SPACE}ms"
    )
    if more_us > 0:
        text += f", {number(more_us)}{SPACE}µs more for each layer"
    if abs(share - 1) > _ADDS_UP:
        text += f". NOT within 5{SPACE}%, so only the shares say something: the profiler takes "
        text += "time itself and may count whole microseconds, or other work ran meanwhile"
    return f"{text}.{_ceilings(found)}"


def _ceilings(found: Json) -> str:
    """What the rates are compared with, and where most time would be gained at the ceiling."""
    ceilings = {p: f"{number(most)} GFLOP/s in {p}" for p, most in found["ceilings"].items()}
    timed = [each for each in found["layers"] if each["gflops"] and each["precision"] in ceilings]
    if not timed:
        return ""
    names = ", ".join(ceilings[p] for p in dict.fromkeys(each["precision"] for each in timed))

    def lost_ms(layer: Json) -> float:
        return float(layer["ms"] * (1 - layer["gflops"] / found["ceilings"][layer["precision"]]))

    most = max(timed, key=lost_ms)
    return (
        f" The ceiling is {names}, the highest that a probe of this CPU or a layer reached; at it "
        f"the most time would be gained in {most['name']}: {number(lost_ms(most))}{SPACE}ms."
    )


def layers_chart(document: Json) -> list[Bars]:
    """One for each engine whose layers were timed."""
    return [_bars(document, found) for found in document.get("layers") or () if found["sum_ms"]]


def _bars(document: Json, found: Json) -> Bars:
    top = found["layers"][:_DRAWN]
    share = _share(top[0]["ms"], found["sum_ms"])
    takes = f"{top[0]['name']} ({top[0]['op']}) takes {share} of the time of all layers. "
    return Bars(
        name="layers",
        title=f"Where the time goes, by layer: {found['label']}",
        finding=takes + layer_note(found),
        x_label="time in one call (ms)",
        parts=("",),
        bars=tuple((f"{short(each['name'], 30)} · {each['op']}", (each["ms"],)) for each in top),
        look=after_setups(document),
        columns=COLUMNS,
        rows=tuple(layer_rows(found)),
    )
