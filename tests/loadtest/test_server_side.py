"""What a load test learns from the server itself, and of the machine around both."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import deploykit as dk
from deploykit.loadtest.generator import server_processes
from deploykit.loadtest.load import apply_conditions, parse_conditions
from deploykit.loadtest.questions import (
    Stage,
    answer_or,
    model_options,
    stages_in_metrics,
    stages_of,
    time_by_stage,
)
from deploykit.loadtest.target import RemoteModel
from deploykit.reporting.figures import request_waterfall
from deploykit.reporting.load_result import LoadResult
from deploykit.reporting.report import Report
from deploykit.reporting.verdict import verdict
from tests.support.measure.loads import load
from tests.support.stand_in import StandIn

PROC = Path("/proc")
QUICK = {"concurrency": 2, "warmup_s": 0.1, "duration_s": 0.4}


@pytest.fixture
def running(affine_onnx: Path) -> Iterator[dk.RunningServer]:
    with dk.serve(affine_onnx) as server:
        yield server


def run(server: dk.RunningServer, grpc: bool) -> LoadResult:
    return load(f"grpc://{server.grpc_url}" if grpc else server.url, **QUICK)


@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
def test_a_server_s_options_hash_and_times_are_in_the_result(
    running: dk.RunningServer, grpc: bool
) -> None:
    result = run(running, grpc)
    assert result.ok > 0
    assert {"server", "version", "platform", "file", "sha256"} <= result.server.keys()
    assert (result.server["server"], result.server["file"]) == ("deploykit", "affine.onnx")
    assert len(result.server["sha256"]) == 64
    assert result.options["backend"] == "onnxruntime"
    assert int(result.options["max_batch_size"]) > 1
    assert result.options["instance_group[0].kind"] == "KIND_CPU"
    assert result.options["dynamic_batching.max_queue_delay_microseconds"].isdecimal()
    http = ["decode", "queue", "compute", "encode", "wire"]
    assert [*result.stages_ms] == (["queue", "compute", "wire"] if grpc else http)
    assert all(ms >= 0 for ms in result.stages_ms.values())
    assert result.latency is not None
    assert result.stages_ms["compute"] <= result.latency.max_ms
    found = request_waterfall(Report("", "", "", serving=(result,)).to_dict())
    assert found is not None
    assert [name for name, _ in found.bars] == ["2 connections"]


def test_the_load_of_other_processes_is_watched(
    running: dk.RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_PROC", "/proc")
    found = run(running, grpc=False).outside
    assert found is not None
    for window in (found.before, found.during, found.after):
        assert window.seconds > 0  # by the kernel's ticks: of any length where they come late
        assert window.others_cores is not None
    assert f"(process {os.getpid()})" not in found.during.busiest  # it serves


def test_a_server_without_options_or_statistics_is_loaded_all_the_same() -> None:
    with StandIn().running() as url:
        result = load(url, **QUICK)
    assert result.ok > 0
    assert (result.options, result.stages_ms, result.notes) == ({}, {}, ())


def test_options_are_flat_short_and_no_more_than_64() -> None:
    config = {
        "name": "m",
        "input": [{"name": "x"}],
        "backend": "ort\nx",
        "max_batch_size": 8,
        "instance_group": [{"kind": "KIND_GPU", "gpus": [0, 1]}],
        "optimization": {"cuda": {"graphs": True}},
        "parameters": {"sha256": {"string_value": "c0ffee"}},
        "deep": {"a": {"b": {"c": {"d": {"e": 1}}}}},
    }
    assert model_options(config) == {
        "backend": "ort x",
        "max_batch_size": "8",
        "instance_group[0].kind": "KIND_GPU",
        "instance_group[0].gpus": "0 1",
        "optimization.cuda.graphs": "True",
        "deep.a.b.c": "{'d': {'e': 1}}",
    }
    many = model_options({f"k{n}": "v" * 1000 for n in range(1000)})
    assert len(many) == 64
    assert max(map(len, many.values())) == 300


BEFORE = {"queue": Stage(10, 1.0), "compute": Stage(10, 2.0), "decode": Stage(9, 0.1)}
AFTER = {"queue": Stage(110, 1.5), "compute": Stage(110, 4.0), "decode": Stage(109, 0.2)}


def test_what_is_left_of_a_client_s_time_is_the_wire() -> None:
    found, why = time_by_stage(BEFORE, AFTER, 100, mean_ms=30.0)
    assert why == ""
    assert found == pytest.approx({"decode": 1.0, "queue": 5.0, "compute": 20.0, "wire": 4.0})
    assert [*found] == ["decode", "queue", "compute", "wire"]
    assert sum(found.values()) == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("answered", "mean_ms", "says"),
    [
        (50, 30.0, "the server counted 100 requests where this client had 50 answers"),
        (103, 30.0, "the server counted 100 requests where this client had 103 answers"),
        (100, 10.0, "longer than what the client measured"),
        (0, 30.0, ""),
    ],
)
def test_times_of_another_client_s_requests_are_not_taken(
    answered: int, mean_ms: float, says: str
) -> None:
    found, why = time_by_stage(BEFORE, AFTER, answered, mean_ms)
    assert found == {}
    assert says in why
    assert bool(says) == bool(why)


def test_a_restarted_server_has_no_times_of_the_run() -> None:
    assert time_by_stage(AFTER, BEFORE, 100, 30.0)[0] == {}
    assert time_by_stage({}, AFTER, 100, 30.0) == ({}, "")


@pytest.mark.parametrize(
    "stats",
    [None, [], "x", {}, {"queue": 5}, {"queue": {"count": -1, "ns": 2}}, {"queue": {"count": "1"}}],
    ids=str,
)
def test_statistics_of_another_form_are_none(stats: object) -> None:
    assert stages_of(stats) == {}


def test_responses_with_names_are_stages_and_triton_s_with_numbers_are_not() -> None:
    took = {"count": 4, "ns": 2_000_000_000}
    stats = dict.fromkeys(("queue", "compute_infer"), took)
    responses = {"crops": {"compute_infer": took}, "0": {"compute_infer": took}, "wrong": 5}
    assert stages_of(stats, responses) == {"queue": Stage(4, 2.0), "crops": Stage(4, 2.0)}
    assert stages_of(stats, {"0": {"compute_infer": took}}).keys() == {"queue", "compute"}
    assert stages_of(stats, [1]).keys() == {"queue", "compute"}


def test_metrics_are_of_the_model_that_was_asked_for() -> None:
    lines = [
        f'deploykit_stage_seconds_{kind}{{model="{model}",version="1",stage="{stage}"}} {value}'
        for model, value in (("a", 2), ("b", 5))
        for stage in ("decode", "queue", "encode")
        for kind in ("sum", "count")
    ]
    assert stages_in_metrics("\n".join(lines), "a") == {
        "decode": Stage(2, 2.0),
        "encode": Stage(2, 2.0),
    }
    assert stages_in_metrics("\n".join(lines[:1]).replace(" 2", " x"), "a") == {}


@pytest.mark.parametrize("error", [dk.BadInput("no answer"), IndexError(), ValueError()], ids=repr)
def test_a_server_that_answers_no_question_ends_no_run(error: Exception) -> None:
    def ask(_model: str) -> dict[str, Stage]:
        raise error

    assert answer_or({}, ask, "m") == {}


def test_the_process_that_listens_is_found() -> None:
    remote = RemoteModel("", "", "127.0.0.1", 0, "m", ())
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        here = replace(remote, port=listening.getsockname()[1])
        assert server_processes(here, PROC) == (os.getpid(),)
        assert server_processes(replace(here, address="192.0.2.1"), PROC) == ()
    assert server_processes(here, PROC) == ()


def test_a_machine_without_proc_has_no_such_process(tmp_path: Path) -> None:
    assert server_processes(RemoteModel("", "", "127.0.0.1", 80, "m", ()), tmp_path) == ()


def test_a_load_next_to_other_work_gives_no_verdict_and_meets_no_condition(
    report: Report,
) -> None:
    (clean, *_) = report.serving
    marked = replace(clean, marks=("other processes ran meanwhile, most of all make (process 7)",))
    (sentence, *_) = verdict(Report("", "", "", serving=(marked,)))
    assert "there is no verdict: other processes ran meanwhile, most of all make" in sentence
    (unmet,) = apply_conditions(marked, parse_conditions("p99>1000s")).unmet
    assert unmet == (
        "p99>1000s: not known, as other processes ran meanwhile, most of all make (process 7)"
    )
    assert apply_conditions(clean, parse_conditions("p99>1000s")).unmet == ()
