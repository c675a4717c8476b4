"""Find a model on a server over HTTP: a connection of its own for each question."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

from deploykit.core.errors import BadInput, DeploykitError, NotFound, first_line
from deploykit.loadtest.check import error_text, one_line

# What a server says of itself: a model's options, and where the time of its requests went.
#
# Times are sums since the server's start, so that the difference of two readings is a run's.

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


TIMEOUT_S = 10.0
MOST_BYTES = 16 << 20  # of an answer before the run


def not_oip(url: str, why: str) -> BadInput:
    return BadInput(
        f"{url}: is not an Open Inference Protocol server ({why})",
        hint="http:// takes the port of its HTTP interface, 8000 by default; gRPC is grpc://",
    )


class HttpQuestions:
    """What a server says over HTTP, a connection for each question."""

    def __init__(self, url: str, host: str, address: str, port: int) -> None:
        self.url, self.host, self.address, self.port = url, host, address, port

    def model_names(self) -> list[str] | None:
        status, body = self._ask("POST", "/v2/repository/index")
        index = _json(body) if status == 200 else None
        if isinstance(index, list) and all(isinstance(item, dict) for item in index):
            ready = [item for item in index if item.get("state", "READY") == "READY"]
            return list(dict.fromkeys(str(item.get("name")) for item in ready))
        if "name" not in self.about():
            raise not_oip(self.url, f"/v2/repository/index: {status}: {error_text(body)}")
        return None

    def metadata(self, model: str) -> dict[str, Any]:
        path = model_path(model)
        status, body = self._ask("GET", path)
        if status == 404:
            raise NotFound(f"{self.url}: no model '{model}': {error_text(body)}")
        found = _json(body) if status == 200 else None
        if not isinstance(found, dict) or not isinstance(found.get("inputs"), list):
            raise not_oip(self.url, f"{path} answered {status}")
        return found

    def about(self) -> dict[str, Any]:
        status, body = self._ask("GET", "/v2")
        found = _json(body) if status == 200 else None
        return found if isinstance(found, dict) else {}

    def config(self, model: str) -> dict[str, Any]:
        status, body = self._ask("GET", f"{model_path(model)}/config")
        found = _json(body) if status == 200 else None
        return found if isinstance(found, dict) else {}

    def stages(self, model: str) -> dict[str, Stage]:
        status, body = self._ask("GET", f"{model_path(model)}/stats")
        found = _json(body) if status == 200 else None
        stats = found.get("model_stats") if isinstance(found, dict) else None
        first = stats[0] if isinstance(stats, list) and stats else None
        if not isinstance(first, dict):
            return {}
        stages = stages_of(first.get("inference_stats"), first.get("response_stats"))
        if "compute" in stages:
            status, body = self._ask("GET", "/metrics")  # of deploykit's servers, with more stages
            if status == 200:
                stages |= stages_in_metrics(body.decode(errors="replace"), model)
        return stages

    def _ask(self, verb: str, path: str) -> tuple[int, bytes]:
        """One request. Raises BadInput when there is no HTTP answer."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=TIMEOUT_S)
        try:
            connection.request(verb, path, None, {"Host": self.host, "Connection": "close"})
            response = connection.getresponse()
            return response.status, response.read(MOST_BYTES)
        except TimeoutError as exc:
            raise BadInput(f"{self.url}: {path}: no answer within {TIMEOUT_S:g} s") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise not_oip(self.url, f"{path}: {one_line(first_line(exc))}") from exc
        finally:
            connection.close()


def model_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
