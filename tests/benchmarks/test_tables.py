"""The comparison's Markdown, and memory from /proc."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients import Sample
from memory import file_pages_kib, held_mib
from tables import Cell, Results, markdown, share_of_ceiling, times_of

TITLES = {"deploykit": "deploykit 1", "slow": "Slow 2", "fast": "Fast 3", "gone": "Gone 4"}


def sample(per_s: float) -> Sample:
    return Sample(per_s, 1.0, 2.0, 0)


def results() -> Results:
    found = Results("tiny", TITLES, reasons={"gone": "not installed: no wheel"})
    rates = {"deploykit": (1000, 2000, 1100), "slow": (100, 200, 110), "fast": (500, 1000, 500)}
    for name, values in rates.items():
        found.samples[Cell(name, "HTTP", 32)] = [sample(value) for value in values]
        found.ready_s[name] = found.ready_mib[name] = found.loaded_mib[name] = [1.0]
    found.samples[Cell("fast", "HTTP", 32)][1] = None
    found.ceilings = [{1: 1500.0, 8: 2000.0}, {1: 1500.0, 8: 4000.0}, {1: 1500.0, 8: 2200.0}]
    return found


def test_ratios_are_paired_by_round_and_shares_are_of_the_best_batch_in_it() -> None:
    times = times_of(results(), "slow", "HTTP", 32)
    assert times is not None
    assert (times.low, times.value, times.high) == pytest.approx((10, 10, 10))
    times = times_of(results(), "fast", "HTTP", 32)  # a round without a figure is left out
    assert times is not None
    assert times.value == pytest.approx((2.0 * 2.2) ** 0.5)
    share = share_of_ceiling(results(), Cell("deploykit", "HTTP", 32))
    assert share is not None
    assert share.value == pytest.approx(0.5)


def test_the_table_marks_the_best_and_says_why_one_is_missing() -> None:
    text = markdown(results())
    assert "2,000 at 8" not in text.splitlines()[0]
    assert "2,200 at 8" in text  # the median round's
    assert "| Gone 4 | not measured |" in text
    assert "Gone 4: not installed: no wheel" in text
    assert "as many requests as the best of the others, Fast 3" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    head = next(line for line in rows if "p99" in line)
    widths = {line.count("|") for line in rows[rows.index(head) : rows.index(head) + 6]}
    assert widths == {head.count("|")}
    found = results()
    found.samples = {cell: samples[:1] for cell, samples in found.samples.items()}
    assert "| 10.00x |" in markdown(found)  # one round has no interval


SMAPS = """\
7f00-7f10 r-xp 00000000 08:01 42                 /usr/lib/libx.so
Size:                100 kB
Rss:                  80 kB
Anonymous:            10 kB
VmFlags: rd ex mr mw me
7f10-7f20 rw-p 00000000 00:00 0
Rss:                  50 kB
Anonymous:            50 kB
7f20-7f30 rw-s 00000000 00:01 7                  /dev/shm/tensor
Rss:                  30 kB
Anonymous:             0 kB
"""


def test_a_librarys_file_pages_count_whole_and_once(tmp_path: Path) -> None:
    assert file_pages_kib(SMAPS) == {("/usr/lib/libx.so", "00000000"): 70}
    own = "Rss: 160 kB\nPss_Anon: 60 kB\nPss_File: 35 kB\nPss_Shmem: 15 kB\n"
    for pid in ("7", "8"):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "smaps").write_text(SMAPS)
        (tmp_path / pid / "smaps_rollup").write_text(own)
    assert held_mib([7, 8, 9], tmp_path) * 1024 == pytest.approx(2 * (60 + 15) + 70)
