"""The table of devices: rows for what is here, reasons for what is not, and the crossover."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.api import compare_devices as verb  # noqa: E402
from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.training.devices import DeviceRow, find_crossover, measure_devices  # noqa: E402
from tests.support.training import LINE, SPLITS  # noqa: E402

pytestmark = pytest.mark.torch


def test_each_device_and_precision_has_a_row_or_a_reason() -> None:
    rows = measure_devices(LINE, SPLITS, [5, 20])
    measured = [row for row in rows if row.absent is None]
    assert {(r.device, r.precision) for r in rows if r.device == "cpu"} == {
        ("cpu", "float32"),
        ("cpu", "bf16"),
    }
    assert [row.batch for row in measured[:2]] == [5, 20]
    for row in measured:
        assert row.steps >= 1
        assert row.samples_per_s == pytest.approx(
            row.batch / (row.step_ms + row.loader_ms) * 1e3, rel=0.05
        )
        assert row.epoch_s == pytest.approx(200 / row.samples_per_s, rel=0.05)
    if not torch.cuda.is_available():
        gpu = [row for row in rows if row.device == "cuda"]
        assert len(gpu) == 8
        assert {row.absent for row in gpu} == {"no GPU here"}
        assert find_crossover(rows) is None


def test_a_batch_larger_than_the_data_is_what_there_is() -> None:
    rows = measure_devices(LINE, SPLITS, [1000])
    assert rows[0].batch == 200


@pytest.mark.parametrize(
    ("gpu", "batch"), [([5, 30, 90], 8), ([50, 60, 90], 1), ([5, 6, 7], None), ([50, 6, 90], 32)]
)
def test_the_crossover_is_the_batch_above_the_last_that_the_cpu_wins(
    gpu: list[float], batch: int | None
) -> None:
    sizes = (1, 8, 32)
    row = DeviceRow("cpu", "float32", 1)
    cpu = [replace(row, batch=size, samples_per_s=10.0) for size in sizes]
    card = [
        replace(row, device="H200", batch=size, samples_per_s=rate)
        for size, rate in zip(sizes, gpu, strict=True)
    ]
    found = find_crossover([*cpu, *card])
    assert found == {"batch": batch, "measured": [1, 8, 32]}


def test_the_folder_holds_the_table_and_the_articles_claims(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("from tests.support.training import LINE as RECIPE\n")
    recipe = f"{tmp_path / 'r.py'}:RECIPE"
    verb.compare_devices(recipe, tmp_path / "t")
    table = verb.compare_devices(recipe, tmp_path / "t")  # its own files are replaced
    document = json.loads((tmp_path / "t" / "devices.json").read_text())
    assert len(document["rows"]) == len(table.rows) == 18
    page = (tmp_path / "t" / "devices.md").read_text()
    assert "340 s on a Ryzen 5 5600X" in page
    assert "26 times" in page
    assert page.count("| cpu |") == 6
    (tmp_path / "t" / "devices.json").write_text("{}")
    with pytest.raises(BadInput, match=r"devices\.json"):
        verb.compare_devices(recipe, tmp_path / "t")
