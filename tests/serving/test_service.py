from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound, Overloaded, Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.fake import FakeEngine
from deploykit.serving.metrics import Histogram
from deploykit.serving.oip import Request
from deploykit.serving.service import ServeOptions, Service
from tests.serving.conftest import WAIT_S, GatedEngine


def ask(rows: int = 1) -> Request:
    feeds = {"x": np.ones((rows, 4), np.float32)}
    return Request(feeds, rows, (("x", "FP32", (4,)),), (("y", True),), None, None)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "stats", " ", "é", "a" * 129, "a\n"])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="cannot be the name of a model"):
        Service({name: FakeEngine()}, ServeOptions())


@pytest.mark.parametrize("name", ["m", "resnet-18_v1.5", "..m", "a" * 128])
def test_a_plain_name_is_taken(name: str) -> None:
    service = Service({name: FakeEngine()}, ServeOptions())
    assert service.find(name).name == name
    service.close()


def test_no_model_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="no model"):
        Service({}, ServeOptions())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_port", 65536),
        ("http_port", -1),
        ("max_batch", 0),
        ("max_delay_us", -1),
        ("queue", 0),
        ("timeout_ms", 0),
        ("max_body_bytes", 0),
    ],
)
def test_an_option_out_of_range_is_named(name: str, value: int) -> None:
    with pytest.raises(BadInput, match="--" + name.replace("_", "-")):
        ServeOptions(**{name: value})


def test_a_bfloat16_model_is_refused_and_no_thread_is_left() -> None:
    engine = FakeEngine()
    engine.outputs = (TensorSpec("y", "bfloat16", ("N", 4)),)
    with pytest.raises(BadInput, match="'y' is bfloat16"):
        Service({"good": FakeEngine(), "m": engine}, ServeOptions())


def test_a_model_without_inputs_is_refused() -> None:
    engine = FakeEngine()
    engine.inputs = ()
    with pytest.raises(Unsupported, match="without inputs"):
        Service({"m": engine}, ServeOptions())


def test_an_unknown_model_is_not_found() -> None:
    service = Service({"m": FakeEngine()}, ServeOptions())
    with pytest.raises(NotFound, match="no model 'x'"):
        service.find("x")
    with pytest.raises(NotFound, match="no version '2'"):
        service.find("m", "2")
    service.close()


def test_a_draining_service_takes_nothing_and_says_so() -> None:
    service = Service({"m": FakeEngine()}, ServeOptions())
    service.drain()
    with pytest.raises(Overloaded, match="shutting down"):
        service.infer(service.find("m"), ask(), lambda _: None)
    assert service.index()[0]["state"] == "UNAVAILABLE"
    assert 'outcome="rejected"} 1' in service.prometheus()
    service.close()


def test_models_with_free_axes_are_not_warmed_up() -> None:
    engine = FakeEngine()
    engine.inputs = (TensorSpec("x", "float32", ("N", "T")),)
    service = Service({"m": engine}, ServeOptions())
    service.warm_up()
    assert engine.batches == []
    service.close()


def test_statistics_of_one_batch() -> None:
    service = Service({"m": FakeEngine()}, ServeOptions())
    model = service.find("m")
    service.infer(model, ask(3), lambda _: None)
    service.close()  # waits for the answer
    stats = service.statistics(model)["model_stats"][0]
    assert (stats["inference_count"], stats["execution_count"]) == (3, 1)
    assert [batch["batch_size"] for batch in stats["batch_stats"]] == [3]
    times = stats["inference_stats"]
    assert times["success"]["ns"] == sum(
        times[part]["ns"] for part in ("queue", "compute_input", "compute_infer", "compute_output")
    )


def test_every_request_of_a_batch_is_counted_and_charged_its_whole_time() -> None:
    engine = GatedEngine()
    engine.warm = True
    service = Service({"m": engine}, ServeOptions())
    model = service.find("m")
    service.infer(model, ask(), lambda _: None)
    assert engine.entered.acquire(timeout=WAIT_S)
    for _ in range(3):
        service.infer(model, ask(2), lambda _: None)
    engine.gate.set()
    service.close()
    stats = service.statistics(model)["model_stats"][0]
    assert (stats["inference_count"], stats["execution_count"]) == (7, 2)
    ran = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert {stats["inference_stats"][part]["count"] for part in ran} == {4}
    by_rows = {batch["batch_size"]: batch["compute_infer"] for batch in stats["batch_stats"]}
    assert {rows: batch["count"] for rows, batch in by_rows.items()} == {1: 1, 6: 1}
    charged_ns = by_rows[1]["ns"] + 3 * by_rows[6]["ns"]
    assert stats["inference_stats"]["compute_infer"]["ns"] == charged_ns


def test_failures_are_told_apart() -> None:
    class Broken(FakeEngine):
        def __call__(self, _feeds):
            raise RuntimeError("broken")

    service = Service({"m": Broken()}, ServeOptions())
    model = service.find("m")
    service.infer(model, ask(), lambda _: None)
    model.metrics.bad_request()
    service.close()
    text = service.prometheus()
    for outcome, count in {"failed": 1, "bad_request": 1, "success": 0, "expired": 0}.items():
        assert (
            f'deploykit_requests_total{{model="m",version="1",outcome="{outcome}"}} {count}\n'
            in text
        )
    assert 'nv_inference_request_failure{model="m",version="1",reason="BACKEND"} 1\n' in text
    assert service.statistics()["model_stats"][0]["inference_stats"]["fail"]["count"] == 2


def test_a_histogram_is_cumulative_and_includes_its_bounds() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (1, 2, 3, 9):
        histogram.add(value)
    assert histogram.lines("h", 'a="b"') == [
        'h_bucket{a="b",le="1"} 1',
        'h_bucket{a="b",le="2"} 2',
        'h_bucket{a="b",le="4"} 3',
        'h_bucket{a="b",le="+Inf"} 4',
        'h_sum{a="b"} 15.0',
        'h_count{a="b"} 4',
    ]


def test_every_line_of_the_metrics_is_prometheus_text() -> None:
    service = Service({"a": FakeEngine(), "b": FakeEngine()}, ServeOptions())
    families = [line.split()[2] for line in service.prometheus().splitlines() if "# TYPE" in line]
    samples = [line for line in service.prometheus().splitlines() if not line.startswith("#")]
    service.close()
    assert len(families) == len(set(families))
    for line in samples:
        name, _, value = line.rpartition(" ")
        assert float(value) >= 0
        assert any(name.startswith(family) for family in families)
