"""What a server says of itself: a model's options, and where the time of its requests went.

Times are sums since the server's start, so that the difference of two readings is a run's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from deploykit.core.errors import DeploykitError
from deploykit.measure.load.check import one_line

STAGES = ("decode", "queue", "compute", "encode")
WIRE = "wire"  # what the client measured beyond the server's stages
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
_SAME = 0.02  # of the requests, by which client and server may differ
_NO_OPTIONS = {
    "name",
    "platform",
    "input",
    "output",
    "parameters",
}  # in other fields, or the model's
_MOST_OPTIONS = 64
_METRIC = re.compile(r"deploykit_stage_seconds_(sum|count)\{([^}]*)\} (\S+)")
_STAGE = re.compile(r'stage="([^"]*)"')


_Found = TypeVar("_Found")


class Stage(NamedTuple):
    """Requests that passed it, and their seconds in all."""

    requests: int
    seconds: float


class Questions(Protocol):
    """What a server is asked, over HTTP or gRPC. None and {}: it has no such thing.

    `model_names`: that are ready. `config`: Triton's ModelConfig. `stages`: times since its start.
    """

    def model_names(self) -> list[str] | None: ...
    def metadata(self, model: str) -> dict[str, Any]: ...
    def about(self) -> dict[str, Any]: ...
    def config(self, model: str) -> dict[str, Any]: ...
    def stages(self, model: str) -> dict[str, Stage]: ...


def answer_or(default: _Found, question: Callable[[str], _Found], model: str) -> _Found:
    """What a server says to a question that no load test needs; `default` where it is nothing."""
    try:
        return question(model)
    except (DeploykitError, IndexError, ValueError):  # no answer, or a damaged one
        return default


def model_options(config: Mapping[str, Any]) -> dict[str, str]:
    """A ModelConfig as names and values: "dynamic_batching.max_queue_delay_microseconds": "0"."""
    given = {name: value for name, value in config.items() if name not in _NO_OPTIONS}
    pairs = list(_flatten("", given))[:_MOST_OPTIONS]
    return {one_line(name): one_line(value) for name, value in pairs if value}


def _flatten(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and depth < 4:
        for key, each in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), each, depth + 1)
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value[:_MOST_OPTIONS]):
            yield from _flatten(f"{name}[{number}]", each, depth + 1)
    elif isinstance(value, list):
        yield name, " ".join(map(str, value[:_MOST_OPTIONS]))
    else:
        yield name, str(value)


def stages_of(inference_stats: object, response_stats: object = None) -> dict[str, Stage]:
    """Of the protocol's statistics; {} where they are not as the protocol says.

    `response_stats`: where deploykit's server has the stages of a pipeline, by name.
    """
    if not isinstance(inference_stats, Mapping):
        return {}
    names = ("queue", *_COMPUTE)
    found = {name: _duration(inference_stats.get(name)) for name in names}
    known = {name: stage for name, stage in found.items() if stage is not None}
    if "queue" not in known or "compute_infer" not in known:
        return {}
    given = response_stats if isinstance(response_stats, Mapping) else {}
    stages = {
        one_line(name): _duration(stats.get("compute_infer"))
        for name, stats in given.items()
        if isinstance(stats, Mapping) and not name.isdecimal()  # Triton's number of the response
    }
    if stages:
        return {"queue": known["queue"], **{n: each for n, each in stages.items() if each}}
    compute_s = sum(known[name].seconds for name in _COMPUTE if name in known)
    return {"queue": known["queue"], "compute": Stage(known["compute_infer"].requests, compute_s)}


def _duration(value: object) -> Stage | None:
    count, ns = (value.get("count"), value.get("ns")) if isinstance(value, Mapping) else (None, 0)
    if isinstance(count, int) and isinstance(ns, int) and count >= 0 and ns >= 0:
        return Stage(count, ns / 1e9)
    return None


def stages_in_metrics(text: str, model: str) -> dict[str, Stage]:
    """Decode and encode of a model. `text`: Prometheus' of deploykit's server."""
    found: dict[tuple[str, str], float] = {}
    for kind, labels, value in _METRIC.findall(text):
        stage = _STAGE.search(labels)
        if f'model="{model}"' in labels and stage and stage[1] in ("decode", "encode"):
            found[stage[1], kind] = found.get((stage[1], kind), 0.0) + _number(value)
    return {
        stage: Stage(int(found[stage, "count"]), found[stage, "sum"])
        for stage in dict.fromkeys(name for name, _ in found)
        if (stage, "count") in found and (stage, "sum") in found
    }


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def time_by_stage(
    before: Mapping[str, Stage], after: Mapping[str, Stage], answered: int, mean_ms: float
) -> tuple[dict[str, float], str]:
    """Mean ms of each stage of `answered` requests, with "wire" as the rest, and why there is none.

    `mean_ms`: as the client measured it. The server must have counted as many requests: others are
    another client's, or of a server of several processes, of which each counts for itself.
    """
    if not answered or "queue" not in before or "queue" not in after:
        return {}, ""
    counted = after["queue"].requests - before["queue"].requests
    if abs(counted - answered) > _SAME * answered:
        why = (
            f"the server counted {counted:,} requests where this client had {answered:,} answers, "
            "so that its times are not of this run"
        )
        return {}, why
    found = {
        name: 1e3 * (after[name].seconds - before[name].seconds) / counted
        for name in (*STAGES, *(each for each in after if each not in STAGES))
        if name in before and name in after
    }
    rest = mean_ms - sum(found.values())
    if min(found.values()) < 0 or rest < 0:
        return {}, "the server's own times are longer than what the client measured"
    return {**found, WIRE: rest}, ""
