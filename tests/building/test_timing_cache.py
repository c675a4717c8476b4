"""The timing cache of a build: kept, given back, and no reason for a build to fail."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from deploykit.building.tensorrt.build import build, cache_path, check
from deploykit.core.machine import Gpu, this_machine
from tests.support.runtimes.fake_tensorrt import Use, options


def test_the_timing_cache_is_kept_and_given_back(use: Use, model: Path, out: Path) -> None:
    file = out.with_name("t.cache")
    does = use()
    first = build(model, out, options(timing_cache=file))
    assert file.read_bytes() == b"timed"
    assert first.built_on["timing_cache_sha256"] == hashlib.sha256(b"timed").hexdigest()
    second = build(model, out, options(timing_cache=file))
    assert does.seen["caches"] == [b"", b"timed"]
    assert second.built_on["timing_cache_sha256"] == hashlib.sha256(b"timedtimed").hexdigest()


def test_a_refused_timing_cache_is_noted_and_replaced(use: Use, model: Path, out: Path) -> None:
    file = out.with_name("t.cache")
    file.write_bytes(b"garbage")
    use(cache_refused=True)
    facts = build(model, out, options(timing_cache=file))
    assert "starts with an empty one" in facts.notes[0]
    assert file.read_bytes() == b"timed"


def test_a_file_of_another_name_that_is_no_timing_cache_is_kept(
    use: Use, model: Path, out: Path
) -> None:
    file = out.with_name("notes.txt")
    file.write_bytes(b"two years of work")
    use(cache_refused=True)
    facts = build(model, out, options(timing_cache=file))
    assert "the file stays as it is" in facts.notes[0]
    assert file.read_bytes() == b"two years of work"


def test_an_empty_file_is_a_timing_cache_without_timings(use: Use, model: Path, out: Path) -> None:
    file = out.with_name("t.cache")
    file.touch()
    use()
    facts = build(model, out, options(timing_cache=file))
    assert not any("t.cache" in note for note in facts.notes)
    assert file.read_bytes() == b"timed"


def test_a_timing_cache_is_not_replaced_for_want_of_a_driver(
    use: Use, model: Path, out: Path
) -> None:
    file = out.with_name("t.cache")
    file.write_bytes(b"made on a GPU")
    use(cache_refused=True, cache_driver=False)
    facts = build(model, out, options(timing_cache=file))
    assert "no NVIDIA driver" in facts.notes[0]
    assert file.read_bytes() == b"made on a GPU"
    assert "timing_cache_sha256" not in facts.built_on


def test_caches_are_kept_apart_by_tensorrt_gpu_and_driver(cache: Path) -> None:
    gpu = Gpu("NVIDIA L4", 1, "580.65.06", "8.9")
    here = replace(this_machine(), gpus=(gpu,), power_mode=None)
    other = replace(here, gpus=(replace(gpu, driver="575.1"),))
    assert cache_path("tensorrt-10.3.0", here) == (
        cache / "timing" / "tensorrt-10.3.0_NVIDIA-L4_580.65.06.cache"
    )
    paths = {cache_path("a", here), cache_path("b", here), cache_path("a", other)}
    assert len(paths) == 3


def test_without_a_gpu_no_cache_is_kept() -> None:
    here = replace(this_machine(), gpus=(), board=None)
    assert cache_path("tensorrt-10.3.0", here) is None


def test_a_jetson_without_nvidia_smi_is_recognised_by_its_board(cache: Path) -> None:
    here = replace(this_machine(), gpus=(), board="Jetson Orin NX", l4t="36.4.3", power_mode="25W")
    path = cache_path("tensorrt-10.3.0", here)
    assert path == cache / "timing" / "tensorrt-10.3.0_Jetson-Orin-NX_36.4.3_25W.cache"


def test_a_timing_cache_that_cannot_be_written_fails_no_build(
    use: Use, model: Path, out: Path
) -> None:
    use()
    facts = build(model, out, options(timing_cache=model / "t.cache"))
    assert out.exists()
    assert any("timing cache was not written" in note for note in facts.notes)


def test_a_check_keeps_nothing(use: Use, model: Path, tmp_path: Path) -> None:
    use()
    before = {file.name for file in tmp_path.iterdir()}
    check(model, options(timing_cache=tmp_path / "t.cache"))
    assert {file.name for file in tmp_path.iterdir()} == before
