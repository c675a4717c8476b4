"""The table of devices and its report: rows for what is here, reasons for what is not."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deploykit.cli.main import main
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.core.recipe import Split
from deploykit.reporting.page import markdown, report_page
from deploykit.training import compare_devices as devices
from deploykit.training.compare_devices import (
    NO_GPU,
    devices_document,
    devices_parts,
    find_crossovers,
    time_augmentation,
    time_devices,
)
from deploykit.training.options import TrainingOptions
from tests.support.training import LINE, SPLITS

pytestmark = pytest.mark.torch
STEPS = 4
IMAGES = np.zeros((40, 9, 13, 3), np.uint8)
RECIPE = "from tests.support.training import LINE as RECIPE\n"


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_LEAST_S", 0.0)
    monkeypatch.setattr(devices, "_STEPS", STEPS)


def test_each_device_and_precision_has_a_row_or_a_reason() -> None:
    rows = time_devices(LINE, SPLITS, [5, 20], TrainingOptions())
    cpu = [(row.precision, row.batch) for row in rows if row.device == "cpu"]
    assert cpu == [("float32", 5), ("float32", 20), ("bf16", 5), ("bf16", 20)]
    for row in rows:
        if row.absent is None:
            assert row.steps == STEPS
            assert row.step_ms.value > 0 < row.loader_ms.value
    if not torch.cuda.is_available():
        gpu = [row for row in rows if row.device == "cuda"]
        assert len(gpu) == 8
        assert {row.absent for row in gpu} == {NO_GPU}


def test_a_batch_that_does_not_fit_is_not_measured() -> None:
    def loss(y: Any, labels: Any) -> Any:
        if len(y) > 10:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return LINE.loss(y, labels)

    small, large = time_devices(replace(LINE, loss=loss), SPLITS, [10, 20], TrainingOptions())[:2]
    assert (small.absent, large.threads) == (None, None)
    assert "on 20 samples, cpu: does not fit into memory" in (large.absent or "")


def test_a_frozen_backbone_s_head_and_compiled_rows_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda run: run)  # it takes many seconds
    parts = OrderedDict(backbone=torch.nn.Linear(2, 3), head=torch.nn.Linear(3, 2))
    frozen = replace(LINE, build=lambda: torch.nn.Sequential(parts), backbone=("backbone", "head"))
    rows = [
        row
        for row in time_devices(frozen, SPLITS, [5], TrainingOptions(compile=True))
        if row.device == "cpu"
    ]
    assert (rows[0].absent, rows[0].steps) == (None, STEPS)
    names = [row.precision for row in rows]
    assert names == ["float32", "float32 compiled", "bf16", "bf16 compiled"]


def rows_of(device: str, precision: str, rates: list[float], spread: float = 0.02) -> list[Any]:
    return [
        devices.DeviceRow(
            *(device, precision, batch, 16),
            Interval(rate, rate * (1 - spread), rate * (1 + spread)),
            *[Interval(*[1e3 * batch / rate] * 3)] * 3,
            20,
            0.1,
        )
        for batch, rate in zip((8, 32, 150), rates, strict=True)
    ]


def test_the_crossover_is_above_the_last_batch_at_which_the_gpu_is_not_ahead() -> None:
    cpu = rows_of("cpu", "float32", [10, 10, 10])
    for gpu, batch in (
        ([5, 30, 90], 32),
        ([50, 60, 90], 8),
        ([5, 6, 7], None),
        ([50, 6, 90], 150),
        ([10.2, 90, 90], 32),  # the intervals touch at batch 8
    ):
        found = find_crossovers([*cpu, *rows_of("cuda", "float32", gpu)])
        assert found == [{"precision": "float32", "batch": batch, "measured": [8, 32, 150]}]
    assert find_crossovers(cpu) == []
    cpu += rows_of("cpu", "bf16", [10, 40, 10])  # the fastest on the CPU, whatever its precision
    gpu = [row for each in ("float32", "bf16") for row in rows_of("cuda", each, [30, 30, 30])]
    found = {each["precision"]: each["batch"] for each in find_crossovers([*cpu, *gpu])}
    assert found == {"float32": 8, "bf16": 150}


def test_augmentation_is_timed_on_each_processor_or_the_reason_given() -> None:
    labels = np.zeros(len(IMAGES), np.int64)
    splits = replace(SPLITS, train=Split({"image": IMAGES}, labels))
    recipe = replace(LINE, augment={"crop": 2})
    rows = time_augmentation(recipe, splits, [4, 1000])
    cpu = [row for row in rows if row.device == "cpu"]
    assert [row.batch for row in cpu] == [4, len(IMAGES)]
    assert all(row.steps == STEPS and row.loader_ms.value > 0 < row.threads for row in cpu)
    if not torch.cuda.is_available():
        assert [row.absent for row in rows if row.device == "cuda"] == [NO_GPU] * 2
    assert time_augmentation(LINE, SPLITS, [4]) == []  # which declares none


def test_the_report_gives_the_crossover_of_augmentation() -> None:
    absent = [devices.DeviceRow("cuda", devices.AUGMENTED, 32, absent=NO_GPU)]
    for gpu, sentence in (
        ([50, 2000, 9000], "from batch 32 on (measured: 8, 32, 150)"),
        ([50, 100, 300], "at no batch size (measured: 8"),
        (None, f"not measured: {NO_GPU}"),
    ):
        on_gpu = rows_of("cuda", devices.AUGMENTED, gpu) if gpu else absent
        rows = (*rows_of("cpu", devices.AUGMENTED, [200, 250, 300]), *on_gpu)
        table = a_table(augmentation=rows, batch=32)
        shown = markdown(devices_document(table), devices_parts(table))
        assert sentence in (table.verdict[-1] if gpu else shown)
        lines = [line for line in shown.splitlines() if "| GPU augmented" in line]
        cells = [line.strip("| ").split(" | ") for line in lines]
        times = [float(row[3].partition(" ")[0]) for row in cells if gpu]
        expected = [gpu[0] / 200, gpu[1] / 250, gpu[2] / 300] if gpu else []
        assert times == pytest.approx(expected)


def a_table(recipe: str = "cats-dogs", **changed: Any) -> devices.DeviceTable:
    rows = [
        *rows_of("cpu", "float32", [200, 250, 300]),
        *rows_of("cpu", "bf16", [100, 150, 200]),
        *rows_of("cuda", "float32", [150, 2000, 6000]),
        *rows_of("cuda", "tf32", [160, 2500, 9000]),
        *rows_of("cuda", "bf16", [140, 2600, 15000]),
        devices.DeviceRow("cuda", "fp16", 8, absent="this GPU is too small"),
    ]
    gpu = {"name": "NVIDIA H200", "driver": "570.1", "memory_bytes": 1 << 37}
    rows = list(changed.pop("rows", rows))
    table = devices.DeviceTable(
        folder=Path("out"),
        recipe=recipe,
        data="photographs",
        samples=2000,
        epochs=20,
        batch=150,
        created="2026-01-01 00:00:00+00:00",
        command="deploykit train cats-dogs --compare-devices -o out",
        machine={"cpu": "AMD EPYC", "gpus": [gpu], "packages": {}},
        rows=tuple(rows),
        crossovers=tuple(find_crossovers(rows)),
        articles=devices.ARTICLES,
    )
    table = replace(table, **changed)
    return replace(table, verdict=tuple(devices.conclude(table)))


def page_of(table: devices.DeviceTable) -> str:
    return report_page(devices_document(table), devices_parts(table))


def test_the_page_is_whole_and_its_headline_compares_like_with_like() -> None:
    table = a_table()
    first, second, *_ = table.verdict
    assert first == (
        "In float32 at batch 150 the GPU trains cats-dogs 20.0 [19.2, 20.8] times as fast as "
        "the CPU (16 threads): 20 epochs of 2,000 samples take 25 s against 500 s."
    )
    assert second == (
        "GPU float32 is ahead of the CPU's float32 from batch 32 on (measured: 8, 32, 150)."
    )
    page = page_of(table)
    assert page.index("<svg") < page.index("Summary")
    for text in ("CPU wins below 32", "GPU: NVIDIA H200", "not measured: this GPU is too small"):
        assert text in page
    text = markdown(devices_document(table), devices_parts(table))
    assert text.startswith("# Training cats-dogs on each device\n\nIn float32 at batch 150")
    assert "<script>alert" not in page_of(a_table("<script>alert(1)</script>\x00"))


def test_a_report_without_a_measured_row_gives_the_reason() -> None:
    row = devices.DeviceRow("cpu", "float32", 8, absent="does not fit into memory")
    table = a_table(rows=(row,), batch=8)
    page = page_of(table)
    assert "not measured: does not fit into memory" in page
    assert "Summary" not in page
    assert table.verdict == ("Nothing could be measured: does not fit into memory.",)


def test_a_rate_that_is_not_certain_wins_nothing() -> None:
    rates = (670, 300, 290)
    for lows, expected in (
        ((0.0, 280.0, 250.0), "at 300 samples/s (280 to 320), in float32 at batch 32"),
        ((0.0, 0.0, 0.0), "The machine was too busy"),
    ):
        rows = [devices.DeviceRow("cuda", "float32", 8, absent=NO_GPU)]
        for row, rate, low in zip(rows_of("cpu", "float32", rates), rates, lows, strict=True):
            rows.append(replace(row, samples_per_s=Interval(rate, low, 2 * rate - low)))
        assert expected in a_table(rows=rows).verdict[0]
    rows = rows_of("cpu", "float32", [10, 10, 10], 0.2) + rows_of("cuda", "float32", [9, 11, 12])
    assert "1.20 [0.980, 1.53] times as fast" in a_table(rows=rows).verdict[0]


def test_the_folder_holds_the_report_and_the_articles_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.py").write_text(RECIPE)
    recipe, folder = f"{tmp_path / 'r.py'}:RECIPE", tmp_path / "t"
    for _ in range(2):  # its own files are replaced
        words = ["deploykit", "train", recipe, "--compare-devices", "-o", str(folder)]
        words += ["--batch-size", "150"]  # four times that would be more than all samples
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit, match="0"):
            main()
    document = json.loads((folder / "report.json").read_text())
    assert [each["claim"][:2] for each in document["articles"]] == ["28", "12", "20"]
    assert len(document["rows"]) == 18
    assert {row["batch"] for row in document["rows"]} == {18, 150, 200}
    for row in document["rows"]:
        if row["absent"] is None:
            rate, batch = row["samples_per_s"]["value"], row["batch"]
            milliseconds = row["step_ms"]["value"] + row["loader_ms"]["value"]
            assert rate == pytest.approx(1e3 * batch / milliseconds, rel=0.01)
            assert row["run_s"]["value"] == pytest.approx(10 * 200 / rate, rel=0.01)
    assert "<svg" in (folder / "report.html").read_text()
    if not torch.cuda.is_available():
        assert f"GPU: not measured, {NO_GPU}." in (folder / "report.md").read_text()
    (folder / "report.json").write_text("{}")
    with pytest.raises(BadInput, match=r"report\.json"):
        devices.compare_devices(recipe, folder, TrainingOptions())
