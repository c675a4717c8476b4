"""The figures of several workers as those of one server."""

from __future__ import annotations

import asyncio
import os
import socket
from mmap import mmap
from typing import Any, cast

import pytest

from deploykit.core.errors import Overloaded
from deploykit.serving.batching.queue import BatchRun, Pending
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.metrics import BucketCounts, Sample
from deploykit.serving.options import ServeOptions
from deploykit.serving.web.page import status
from deploykit.serving.workers import parent
from deploykit.serving.workers.link import Channel, LinkLost
from deploykit.serving.workers.parent import Worker
from tests.support.fake_engine import FakeEngine


def report(*sizes: int) -> parent.Report:
    """Of a worker that ran one batch of each of `sizes`, in 10 us per row."""
    with_one = ModelRepository({"m": FakeEngine()}, ServeOptions(queue=5))
    (model,) = with_one.models.values()
    for rows in sizes:
        pending = Pending({}, rows, (), lambda _: None, 0, 1, 1, 0, None, 0)
        model.metrics.record_run(BatchRun([pending], 0, 0, 0, 10 * rows, 0, 0))
        model.metrics.record_answer(pending, 1, 100)
    found = {
        "samples": with_one.samples(),
        "statistics": with_one.statistics(),
        "status": status(with_one),
    }
    with_one.close()
    return found


def value(samples: list[Sample], name: str, **labels: str) -> float | BucketCounts:
    (found,) = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
    return found.value


def test_gauges_show_what_an_operator_has_to_see() -> None:
    labels = {"model": "m", "version": "1"}
    values = {
        "deploykit_model_ready": (1, 0, 0),
        "deploykit_model_generation": (2, 1, 1),
        "deploykit_reload_failed": (0, 1, 1),
        "deploykit_queue_depth": (3, 4, 7),
        "deploykit_batch_limit_rows": (32, 16, 32),
        "nv_gpu_utilization": (0.5, 0.5, 0.5),
        "nv_energy_consumption": (7.0, 7.5, 7.5),  # of the one GPU that both have
    }
    reports = [{"samples": [Sample(n, labels, v[i]) for n, v in values.items()]} for i in (0, 1)]
    merged = {sample.name: sample.value for sample in parent.merge_samples(reports)}
    assert merged == {name: each[2] for name, each in values.items()}


def test_figures_are_added_up_and_have_the_form_of_those_of_one() -> None:
    reports = [report(1, 4), report(4)]
    for number, each in enumerate(reports):
        each["status"]["process"] = {"cpu_s": 2.0, "started_s": 10 + number, "at_s": 20 + number}
    samples = parent.merge_samples(reports)
    assert value(samples, "deploykit_requests_total", outcome="success") == 3
    assert value(samples, "nv_inference_count") == 9
    rows = value(samples, "deploykit_batch_rows")
    assert isinstance(rows, BucketCounts)
    counts = dict(rows.counts)
    assert (counts["1"], counts["4"], counts["+Inf"], rows.total) == (1, 3, 3, 9)
    (model,), (one,) = (
        each["model_stats"] for each in (parent.merge_statistics(reports), reports[0]["statistics"])
    )
    assert model.keys() == one.keys()
    assert (model["inference_count"], model["execution_count"]) == (9, 3)
    assert model["inference_stats"]["success"]["count"] == 3
    sizes = {b["batch_size"]: b["compute_infer"] for b in model["batch_stats"]}
    assert sizes == {1: {"count": 1, "ns": 10_000}, 4: {"count": 2, "ns": 80_000}}
    status, alone = parent.merge_status(reports), reports[0]["status"]
    (model,), (one,) = status["models"], alone["models"]
    assert (status.keys(), model.keys()) == (alone.keys(), one.keys())
    assert (model["rows"], model["queue"], model["engines"]) == (9, 10, 2)
    assert (model["outcomes"]["success"], sum(model["request"]["counts"])) == (3, 3)
    assert status["process"] == {"cpu_s": 4.0, "started_s": 10, "at_s": 21}


@pytest.mark.parametrize("dead", [1, 2])
def test_a_worker_that_has_ended_leaves_its_counters_alone(dead: int) -> None:
    ended = parent.counters([report(1)])
    for _ in range(dead - 1):
        ended = parent.counters([ended, report(1)])
    reports = [report(4), ended]
    samples = parent.merge_samples(reports)
    assert value(samples, "deploykit_requests_total", outcome="success") == 1 + dead
    assert value(samples, "deploykit_engines") == 1
    status = parent.merge_status(reports)
    assert status["models"][0]["rows"] == 4 + dead
    assert status["models"][0]["engines"] == 1
    (model,) = parent.merge_statistics(reports)["model_stats"]
    assert model["inference_count"] == 4 + dead


def test_many_changes_at_once_do_not_make_a_slow_worker_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each counted as if it were another second: a client with 30 regions had it killed."""
    monkeypatch.setattr(parent, "REPORT_S", 0.01)

    async def change() -> tuple[list[Any], int]:
        worker = Worker(1, os.getpid(), mmap(-1, 1))
        worker.ready = True
        ours, theirs = socket.socketpair()
        worker.link = Channel(print, cast("Any", print), print)
        await worker.link.connect(ours)
        found = parent.Hub({worker.pid: worker}, 1)
        asked = [found.answer(("change", "register", (str(n),))) for n in range(100)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        theirs.close()
        return answers, worker.missed

    answers, missed = asyncio.run(change())
    assert {type(each) for each in answers} == {Overloaded}
    assert missed == 0


def test_a_question_to_a_process_that_ends_is_an_error_and_so_is_a_later_one() -> None:
    async def run() -> None:
        channel, (ours, theirs) = Channel(print, cast("Any", print), print), socket.socketpair()
        await channel.connect(ours)
        asked = channel.ask("report")
        theirs.close()
        for each in (asked, channel.ask("report")):
            with pytest.raises(LinkLost):
                await asyncio.wait_for(each, 60)

    asyncio.run(run())
