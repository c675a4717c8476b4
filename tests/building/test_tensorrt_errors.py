"""Builds that are refused before TensorRT is asked, or broken off while it works."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from deploykit.building.tensorrt.build import build
from deploykit.building.tensorrt.progress import BuildProgress
from deploykit.core.errors import BadInput, NotFound, Unsupported
from tests.support.builders.tensorrt_fixtures import (  # noqa: F401
    Use,
    cache_fixture,
    model_fixture,
    options,
    out_fixture,
    use_fixture,
)
from tests.support.onnx_zoo import linear, save

# memory, progress, interruption


def test_too_little_free_memory_is_refused_before_the_build(
    use: Use, model: Path, out: Path
) -> None:
    does = use()
    with pytest.raises(Unsupported, match=r"64 MiB of workspace, but only 10 MiB are free"):
        build(model, out, options(free_bytes=10 << 20))
    assert "strong" not in does.seen


def test_a_workspace_is_cut_to_the_free_memory_with_a_note(
    use: Use, model: Path, out: Path
) -> None:
    does = use()
    facts = build(model, out, options(free_bytes=1 << 30))
    assert 1000 << 20 < does.seen["WORKSPACE"] < 1 << 30
    assert "instead of 6,144 MiB" in facts.notes[0]
    assert build(model, out, options(free_bytes=8 << 30)).notes == facts.notes[1:]
    assert does.seen["WORKSPACE"] == 6 << 30


def test_ctrl_c_stops_the_build_and_leaves_the_previous_plan(
    use: Use, model: Path, out: Path
) -> None:
    out.write_bytes(b"previous")
    use(during_build=lambda: signal.raise_signal(signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build(model, out, options())
    assert out.read_bytes() == b"previous"
    assert signal.getsignal(signal.SIGINT) is handler


def test_sigterm_stops_the_build_as_its_handler_says(use: Use, model: Path, out: Path) -> None:
    def leave(number: int, frame: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        use(during_build=lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit):
            build(model, out, options())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_in_on_progress_comes_through(use: Use, model: Path, out: Path) -> None:
    use()

    def fails(text: str, share: float) -> None:
        if text == "Building engine":
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        build(model, out, options(), fails)
    assert not out.exists()


def test_progress_from_several_threads_never_falls_and_comes_one_call_at_a_time() -> None:
    """IProgressMonitor: "must be thread-safe", as several internal threads may call it."""
    shares: list[float] = []
    busy = threading.Lock()

    def on_progress(phase: str, share: float) -> None:
        assert busy.acquire(blocking=False)
        time.sleep(0)  # lets another thread in, where one is
        shares.append(share)
        busy.release()

    progress = BuildProgress(on_progress)
    progress.start("build", None, 4)

    def work(number: int) -> None:
        for step in range(50):
            progress.start(f"{number}.{step}", "build", 2)
            assert progress.step(f"{number}.{step}", 1)
            progress.finish(f"{number}.{step}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.failure is None
    assert len(shares) == 401
    assert shares == sorted(shares)


# what is refused before TensorRT is asked


def test_an_unknown_flavour_is_bad_input(model: Path, out: Path) -> None:
    with pytest.raises(BadInput, match="`flavour`: unknown value 'lite"):
        build(model, out, options(flavour="lite"))


def test_weights_outside_the_models_folder_are_not_read(
    use: Use, out: Path, tmp_path: Path
) -> None:
    import onnx

    graph = linear()
    for tensor in graph.graph.initializer:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="../secret")
    does = use()
    with pytest.raises(BadInput, match="outside the model's folder"):
        build(save(graph, tmp_path / "evil.onnx"), out, options())
    assert not does.seen


def test_a_file_of_another_format_is_bad_input(use: Use, out: Path, tmp_path: Path) -> None:
    use()
    plan = tmp_path / "other.onnx"
    plan.write_bytes(b"ftrt" + bytes(100))
    with pytest.raises(BadInput, match="expected an ONNX file, got a tensorrt file"):
        build(plan, out, options())


def test_a_missing_model_is_not_found(use: Use, out: Path, tmp_path: Path) -> None:
    use()
    with pytest.raises(NotFound, match=r"none\.onnx"):
        build(tmp_path / "none.onnx", out, options())


def test_the_model_is_not_replaced_by_its_plan(use: Use, model: Path) -> None:
    use()
    before = model.read_bytes()
    with pytest.raises(BadInput, match="is the model itself"):
        build(model, model, options())
    assert model.read_bytes() == before


def test_an_output_that_cannot_be_written_is_refused_before_the_build(
    use: Use, model: Path, tmp_path: Path
) -> None:
    does = use()
    with pytest.raises(BadInput, match="does not exist"):
        build(model, tmp_path / "none" / "m.trt", options())
    assert not does.seen
