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
from deploykit.serving.observe.metrics import Sampler
from deploykit.serving.observe.prometheus import METRICS, Sample
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine
from tests.support.serving.scrapes import exposition

FILE = Path(__file__).resolve().parent.parent / "examples" / "grafana-dashboard.json"
DASHBOARD = json.loads(FILE.read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
FUNCTIONS = {"sum", "by", "rate", "increase", "histogram_quantile", "scalar", "changes"}
ADDED = {"job", "instance"}  # labels that Prometheus itself adds to what it collects
PORTS = ("http", "grpc")
NOT_DRAWN = {
    "deploykit_gpu_info",  # for joins
    "deploykit_model_info",
    "deploykit_model_generation",  # for alerts
    "deploykit_model_loaded_timestamp_seconds",
    "deploykit_previous_engine",
    "deploykit_held_bytes",
    "deploykit_held_limit_bytes",
    "deploykit_http_responses_total",
    "deploykit_grpc_responses_total",
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
    watching = shadow.Shadow("m", FakeEngine(), rate=1.0, alarm=0.01)
    reloading = reload.Reloader(service, {"m": reload.Source(FILE, list)}, poll_s=60)
    log = logs.configure("text")
    held = [Sample("deploykit_held_bytes", {}, 0), Sample("deploykit_held_limit_bytes", {}, 1)]
    held += [Sample("deploykit_workers", {}, 2), Sample("deploykit_worker_restarts_total", {}, 0)]
    held += [Sample(f"deploykit_{each}_responses_total", {"code": "200"}, 0) for each in PORTS]
    spans = [Sample("deploykit_spans_dropped_total", {}, 0)]
    spans += [Sample("deploykit_previous_engine", {"model": "m"}, 0)]  # of `boot`
    for samples in (sampler.samples, watching.samples, reloading.samples, logs.samples):
        service.add_metrics(samples)
    service.add_metrics(lambda: [*held, *spans])
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
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"]
                 if each["type"] == "query"]  # fmt: skip
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


def test_every_metric_is_in_a_panel() -> None:
    drawn = {name for expression in EXPRESSIONS for name in names_in(expression)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in drawn} | drawn
    ours = {name for name in METRICS if name.startswith("deploykit_")}
    assert ours - families == NOT_DRAWN


def test_every_metric_is_emitted(emitted: dict[str, set[str]]) -> None:
    families = {
        name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name) for name in emitted
    }
    assert families == METRICS.keys()
