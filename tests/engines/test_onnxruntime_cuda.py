"""What ONNX Runtime's engine does for CUDA, as far as a session on the CPU shows it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, OutOfMemory, Unsupported
from deploykit.engines.cuda.errors import CaptureRefused, DeviceLost
from tests.support.runtimes import cases

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.engines.onnxruntime.engine import (  # noqa: E402
    Binding,
    OnnxRuntimeEngine,
    check_placement,
    onnxruntime_errors,
    open_engine,
    ort_state,
    session_options,
)


def bound(path: Path, graphs: tuple[int, ...] = ()) -> tuple[Binding, OnnxRuntimeEngine]:
    engine = open_engine(path, "cpu")
    return (
        Binding(ort, engine.session, engine.inputs, engine.outputs, ("cpu", 0), graphs),
        engine,
    )


@pytest.mark.parametrize("graphs", [(), (1, 2, 7)])
def test_bound_calls_answer_as_plain_ones(affine_onnx: Path, graphs: tuple[int, ...]) -> None:
    call, engine = bound(affine_onnx, graphs)
    kept = []
    for start, batch in enumerate((1, 2, 7, 2, 0, 3, 1, 2, 2)):
        x = np.arange(batch * 4, dtype=np.float32).reshape(batch, 4) + start
        kept.append((call({"x": x})["y"].copy(), engine({"x": x})["y"]))
    for got, wanted in kept:
        np.testing.assert_array_equal(got, wanted)


def test_the_copy_times_of_the_last_call_are_reported(affine_onnx: Path) -> None:
    """Four megabytes in take more than a microsecond; on a CPU the answer is not copied."""
    call, engine = bound(affine_onnx)
    assert call.last_copies_us == engine.last_copies_us == (0, 0)
    before_ns = time.perf_counter_ns()
    call({"x": np.zeros((1 << 18, 4), np.float32)})
    taken_us = (time.perf_counter_ns() - before_ns) // 1000
    assert call.last_copies_us[0] > 0
    assert sum(call.last_copies_us) <= taken_us


@pytest.mark.parametrize("graphs", [(), (3,)])
def test_bound_call_takes_any_memory_layout(affine_onnx: Path, graphs: tuple[int, ...]) -> None:
    call, _ = bound(affine_onnx, graphs)
    x = np.arange(12, dtype=np.float32).reshape(4, 3).T
    for _ in range(3):
        np.testing.assert_array_equal(call({"x": x})["y"], 2 * x + 1)


@pytest.mark.parametrize("case", [cases.IDS, cases.MASK, cases.HALF, cases.TWO_INPUTS])
def test_bound_calls_carry_every_type(tmp_path: Path, case: cases.Case) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(cases.onnx_model(case).SerializeToString())
    call, _ = bound(path)
    feeds = case.feeds(3)
    answers = call(feeds)
    assert list(answers) == [spec.name for spec in case.output_specs]
    for name, wanted in case.compute(feeds).items():
        np.testing.assert_array_equal(answers[name], wanted)


class Counted:
    """ONNX Runtime's module that counts what is allocated and the graphs that runs name."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []
        self.graphs: list[str] = []
        outer = self

        class Value:
            @staticmethod
            def ortvalue_from_shape_and_type(shape: list[int], *rest: object) -> object:
                outer.made.append(tuple(shape))
                return ort.OrtValue.ortvalue_from_shape_and_type(shape, *rest)

        class Options(ort.RunOptions):  # type: ignore[misc]
            def add_run_config_entry(self, key: str, value: str) -> None:
                assert key == "gpu_graph_id"
                outer.graphs.append(value)
                super().add_run_config_entry(key, value)

        self.OrtValue, self.RunOptions = Value, Options


def counted(path: Path, graphs: tuple[int, ...] = ()) -> tuple[Counted, Binding]:
    module, engine = Counted(), open_engine(path, "cpu")
    ends = engine.inputs, engine.outputs
    return module, Binding(module, engine.session, *ends, ("cpu", 0), graphs)


def test_buffers_of_a_shape_are_made_once(affine_onnx: Path) -> None:
    module, call = counted(affine_onnx)
    for batch in (2, 3, 2, 3, 2):
        call({"x": np.zeros((batch, 4), np.float32)})
    assert module.made == [(2, 4), (3, 4)]
    assert module.graphs == []


def test_buffers_of_shapes_long_unused_are_freed(affine_onnx: Path) -> None:
    module, call = counted(affine_onnx)
    for batch in [*range(1, 12), 11, 1]:
        call({"x": np.zeros((batch, 4), np.float32)})
    assert len(module.made) == 12  # batch 1 twice


def test_first_run_of_a_graphs_shape_is_not_captured_and_each_shape_has_its_own(
    affine_onnx: Path,
) -> None:
    module, call = counted(affine_onnx, (1, 2))
    for batch in (1, 2, 3, 1, 2, 3, 1):
        call({"x": np.zeros((batch, 4), np.float32)})
    assert module.graphs == ["-1", "1", "-1", "2", "-1"]
    assert module.made == [(1, 4), (1, 4), (2, 4), (2, 4), (3, 4)]  # with outputs, but for 3


def test_cuda_with_every_node_on_the_cpu_is_refused(affine_onnx: Path) -> None:
    options = session_options(1)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(str(affine_onnx), options, providers=["CPUExecutionProvider"])
    if not hasattr(session, "get_provider_graph_assignment_info"):
        pytest.skip(f"onnxruntime {ort.__version__} cannot tell")
    with pytest.raises(Unsupported, match=r"affine\.onnx: .*every node runs on the CPU"):
        check_placement(affine_onnx, session, "1")


def placed(**kinds: list[str]) -> Any:
    """A session with nodes of these kinds on each provider."""
    parts = [
        SimpleNamespace(
            ep_name=f"{name}ExecutionProvider",
            get_nodes=lambda found=found: [SimpleNamespace(op_type=kind) for kind in found],
        )
        for name, found in kinds.items()
    ]
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)


@pytest.mark.parametrize(
    ("session", "note"),
    [
        (object(), "onnxruntime 1.20.0 does not report"),
        (placed(CUDA=["Conv"] * 7, CPU=["Shape", "NonZero"]), "2 of 9 nodes .*: NonZero, Shape"),
        (placed(CPU=[*"abcdefgh"], CUDA=["x"]), "a, b, c, d, e, f and 2 kinds more"),
        (placed(CUDA=["Conv"]), ""),
        (placed(), ""),
    ],
)
def test_nodes_that_stay_on_the_cpu_are_counted_and_named(session: Any, note: str) -> None:
    notes = check_placement(Path("m.onnx"), session, "1.20.0")
    assert len(notes) == bool(note)
    assert not note or re.search(note, notes[0])


def test_engine_on_the_cpu_has_no_notes(affine_onnx: Path) -> None:
    with open_engine(affine_onnx, "cpu", graphs=[1]) as engine:
        assert engine.notes == ()


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (
            "CUDA failure 700: an illegal memory access was encountered ; GPU=0",
            DeviceLost,
            "700|Ill",
        ),
        ("CUDA failure 2: out of memory ; GPU=0 ; hostname=h", OutOfMemory, "out of memory"),
        ("CUDA failure 100: no CUDA-capable device ; GPU=0", Unsupported, "no usable GPU"),
        ("CUDA failure 900: operation not permitted ; GPU=0", CaptureRefused, "900|Capture"),
        ("Failed to allocate memory for requested buffer of size 4194304", OutOfMemory, "4.0 MiB"),
    ],
)
@pytest.mark.parametrize("raised", [ort_state.Fail, ort_state.RuntimeException, RuntimeError])
def test_cuda_failures_keep_their_meaning(
    text: str, kind: type[Unsupported], says: str, raised: type[Exception]
) -> None:
    with pytest.raises(kind, match=rf"m\.onnx: cuda:0.*({says})") as caught:  # noqa: SIM117
        with onnxruntime_errors(Path("m.onnx"), "cuda:0"):
            raise raised(text)
    assert type(caught.value) is kind


def test_an_out_of_memory_message_on_the_cpu_names_the_sizes() -> None:
    text = "Failed to allocate memory for requested buffer of size 4194304"
    with (
        pytest.raises(
            OutOfMemory, match=r"m\.onnx: does not fit into memory: 4\.0 MiB were needed"
        ),
        onnxruntime_errors(Path("m.onnx")),
    ):
        raise ort_state.RuntimeException(text)


def test_sizes_in_a_file_that_overflow_are_the_files_fault() -> None:
    """Newer versions refuse such a graph; 1.23, the last for Python 3.10, fails as it opens it."""
    text = "safeint.h:17 SafeIntExceptionHandler<>::SafeIntOnOverflow() Integer overflow"
    with pytest.raises(BadInput, match=r"m\.onnx: .*overflow"), onnxruntime_errors(Path("m.onnx")):
        raise ort_state.RuntimeException(text)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [(), (1, 8)])
def test_cuda_answers_as_the_cpu_does(tmp_path: Path, graphs: tuple[int, ...]) -> None:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    from tests.support.onnx_zoo import mnist_like, save

    path = save(mnist_like(), tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    with open_engine(path, "cuda", graphs=graphs) as gpu, open_engine(path, "cpu") as cpu:
        assert gpu.notes == ()  # every node on the GPU, every graph made
        for batch in (1, 8, 3, 1, 8, 1, 8, 3):
            feeds = {"image": random.random((batch, 1, 28, 28), dtype=np.float32)}
            got, wanted = gpu(feeds)["logits"], cpu(feeds)["logits"]
            np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)  # TF32 convolutions
