"""The dashboard in examples/: it asks for what the server emits, and leaves nothing of it out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploykit.engines.devices import Devices, GpuState
from deploykit.serving.models import reload, shadow
from deploykit.serving.models.pipelines import PipelineCounts
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe import logs
from deploykit.serving.observe.metrics import METRICS, Sample, Sampler
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine
from tests.support.serving.scrapes import exposition

FILE = Path(__file__).resolve().parent.parent / "examples" / "grafana-dashboard.json"
DASHBOARD = json.loads(FILE.read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
FUNCTIONS = {"sum", "by", "rate", "increase", "histogram_quantile", "scalar", "changes"}
ADDED = {"job", "instance"}  # labels that Prometheus itself adds to what it collects
NOT_DRAWN = {  # they are for joins and alerts
    f"deploykit_{name}"
    for name in (
        *("gpu_info", "model_info", "model_generation", "model_loaded_timestamp_seconds"),
        *("previous_engine", "held_bytes", "held_limit_bytes"),
        *("http_responses_total", "grpc_responses_total"),
    )
}


class OneGpu(Devices):
    """Every value that a GPU can report."""

    def __init__(self) -> None:
        pass

    def read(self) -> tuple[GpuState, ...]:
        used, rails, zones = [0.5, 1.0, 2.0, 3.0, 4, 5, 6, 7, 8.0], (("VIN", 9.0),), (("tj", 50.0),)
        return (GpuState("G", "n", 0, "nvml", *used, (), rails=rails, zones=zones),)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def emitted() -> Iterator[dict[str, set[str]]]:
    """Metric names as they stand in /metrics, with their labels."""
    service = ModelRepository({"m": FakeEngine()}, ServeOptions(slo_ms=50))
    service.warm_up()
    service.expire()  # steers by what the warm-up took
    sampler = Sampler(OneGpu())
    watching = shadow.Shadow("m", FakeEngine(), every=1)
    reloading = reload.Reloader(service, {"m": reload.Source(FILE, list)}, poll_s=60)
    log = logs.configure("text")
    plain = ("held_bytes", "held_limit_bytes", "workers", "worker_restarts_total")
    others: dict[str, dict[str, str]] = {name: {} for name in (*plain, "spans_dropped_total")}
    others |= {f"{port}_responses_total": {"code": "200"} for port in ("http", "grpc")}
    others["previous_engine"] = {"model": "m"}  # of `boot`
    held = [Sample(f"deploykit_{name}", labels, 0) for name, labels in others.items()]
    for samples in (sampler.samples, watching.samples, reloading.samples, logs.samples):
        service.add_metrics(samples)
    service.add_metrics(lambda: held)
    service.add_metrics(PipelineCounts({"pipeline": "p"}).samples)
    service.add_metrics(PipelineCounts({"pipeline": "p", "stage": "s"}, lambda: 1).samples)
    while sampler.latest() is None:
        pass
    found: dict[str, set[str]] = {}
    for line in exposition(service.samples())[0].decode().splitlines():
        if not line.startswith("#"):
            name, _, rest = line.rpartition(" ")[0].partition("{")
            labels = set(re.findall(r'([a-z_]+)="', rest))
            found.setdefault(name, set()).update(labels)
    yield found
    for each in (log, reloading, watching, sampler):
        each.close()
    service.close()


def names_in(expression: str) -> set[str]:
    """The metrics of an expression: its words that are no label, text, function or variable."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]|\{[^}]*\}|\bby \([^)]*\)', " ", expression)
    return set(re.findall(r"[a-zA-Z_][a-zA-Z0-9_]*", bare)) - FUNCTIONS


def all_expressions() -> list[str]:
    queries = (each for each in DASHBOARD["templating"]["list"] if each["type"] == "query")
    variables = (each["query"]["query"] for each in queries)
    inner = [re.sub(r"label_values\((\w+), \w+\)", r"\1", query) for query in variables]
    return [*EXPRESSIONS, *inner, *(each["expr"] for each in DASHBOARD["annotations"]["list"])]


@pytest.mark.parametrize("expression", all_expressions())
def test_every_metric_in_a_panel_is_emitted(emitted: dict[str, set[str]], expression: str) -> None:
    names = names_in(expression)
    assert names
    for name in names:
        assert name in emitted
    for name, selector in re.findall(r"([a-z_]+)\{([^}]*)\}", expression):
        for used in re.findall(r"([a-z_]+)=~?\"", selector):
            assert used in emitted[name] | ADDED, f"{name} has no label {used}"
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        labels = set().union(*(emitted[name] for name in names))
        assert set(re.split(r",\s*", grouped)) <= labels


def family(name: str) -> str:
    return name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)


def test_every_metric_is_emitted_and_in_a_panel(emitted: dict[str, set[str]]) -> None:
    assert {family(name) for name in emitted} == METRICS.keys()
    drawn = {family(name) for expression in EXPRESSIONS for name in names_in(expression)}
    assert {name for name in METRICS if name.startswith("deploykit_")} - drawn == NOT_DRAWN
