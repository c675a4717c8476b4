"""What ONNX Runtime's engine does for CUDA, as far as a session on the CPU shows it."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeviceLost, OutOfMemory, Unsupported
from tests.support.onnx_zoo import mnist_like, save
from tests.support.runtimes import cases

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.engines.onnxruntime import engine as onnxruntime_engine  # noqa: E402
from deploykit.engines.onnxruntime.engine import (  # noqa: E402
    BatchSizes,
    Binding,
    check_placement,
    onnxruntime_errors,
    open_engine,
    ort_state,
    preload,
    session_options,
)


class Counted:
    """ONNX Runtime's module that counts what is allocated."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []
        outer = self

        class Value:
            @staticmethod
            def ortvalue_from_shape_and_type(shape: list[int], *rest: object) -> object:
                outer.made.append(tuple(shape))
                return ort.OrtValue.ortvalue_from_shape_and_type(shape, *rest)

        self.OrtValue = Value


def bound(path: Path) -> tuple[Counted, Binding]:
    module, engine = Counted(), open_engine(path, "cpu")
    assert engine.notes == ()
    return module, Binding(module, engine.session, engine.inputs, engine.outputs, ("cpu", 0))


def test_bound_calls_answer_as_plain_ones_in_any_memory_layout(affine_onnx: Path) -> None:
    _, call = bound(affine_onnx)
    kept = []
    for start, batch in enumerate((1, 2, 7, 2, 0, 3, 1, 2, 2)):
        x = np.arange(batch * 4, dtype=np.float32).reshape(4, batch).T + start
        kept.append((call({"x": x})["y"].copy(), 2 * x + 1))
    for got, wanted in kept:
        np.testing.assert_array_equal(got, wanted)


def test_the_copy_times_of_the_last_call_are_reported(affine_onnx: Path) -> None:
    """Four megabytes in take more than a microsecond; on a CPU the answer is not copied."""
    _, call = bound(affine_onnx)
    assert call.last_copies_us == (0, 0)
    before_ns = time.perf_counter_ns()
    call({"x": np.zeros((1 << 18, 4), np.float32)})
    taken_us = (time.perf_counter_ns() - before_ns) // 1000
    assert call.last_copies_us[0] > 0
    assert sum(call.last_copies_us) <= taken_us


@pytest.mark.parametrize("case", [cases.IDS, cases.MASK, cases.HALF, cases.TWO_INPUTS])
def test_bound_calls_carry_every_type(tmp_path: Path, case: cases.Case) -> None:
    _, call = bound(save(cases.onnx_model(case), tmp_path / "m.onnx"))
    feeds = case.feeds(3)
    answers = call(feeds)
    assert list(answers) == [spec.name for spec in case.output_specs]
    for name, wanted in case.compute(feeds).items():
        np.testing.assert_array_equal(answers[name], wanted)


@pytest.mark.parametrize(
    ("batches", "made"),
    [
        ([2, 3, 2, 3, 2], [2, 3]),
        ([*range(1, 12), 11, 1], [*range(1, 12), 1]),  # those long unused are freed
    ],
)
def test_buffers_of_a_shape_are_made_once(
    affine_onnx: Path, batches: list[int], made: list[int]
) -> None:
    module, call = bound(affine_onnx)
    for batch in batches:
        call({"x": np.zeros((batch, 4), np.float32)})
    assert module.made == [(n, 4) for n in made]


class Session:
    """A bound session of y = 2 x that plans anew, for `plan_us`, when its input's shape changes."""

    def __init__(self, clock: list[int], plan_us: int, fails: bool = False) -> None:
        self.clock, self.plan_us, self.fails = clock, plan_us, fails
        self.seen: list[int] = []
        self.last_copies_us = (len(clock), 0)
        self.open = True

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        if self.fails:
            raise OutOfMemory("no memory")
        x = feeds["x"]
        planned = self.seen and self.seen[-1] == len(x)
        self.clock[0] += 1000 + (0 if planned else 1000 * self.plan_us)
        self.seen.append(len(x))
        return {"y": 2 * x}

    def close(self) -> None:
        self.open = False


def prepared(plan_us: int, sizes: list[int], fails_from: int = 99) -> tuple[BatchSizes, list[Any]]:
    clock, made = [0], list[Any]()

    def reopen() -> Any:
        made.append(Session(clock, plan_us, fails=len(made) >= fails_from))
        return made[-1]

    call = BatchSizes(reopen(), reopen, lambda: clock[0])
    call.prepare({"x": np.zeros((rows, 2), np.float32)} for rows in sizes)
    for session in made:
        session.seen = session.seen[-1:]
    return call, made


def test_batches_of_any_size_make_no_session_plan_anew() -> None:
    call, made = prepared(100, [32, 16, 8, 4, 2, 1])
    for rows in (6, 26, 1, 32, 8, 9, 2, 1):
        x = np.random.default_rng(rows).random((rows, 2), np.float32)
        np.testing.assert_array_equal(call({"x": x})["y"], 2 * x)
    assert [set(session.seen) for session in made] == [{32}, {8}, {1}]
    call.close()
    assert not any(session.open for session in made)


@pytest.mark.parametrize(("plan_us", "sizes"), [(0, [32, 8, 1]), (1, [32, 8, 1]), (100, [1])])
def test_one_session_is_enough_where_a_new_size_costs_little(
    plan_us: int, sizes: list[int]
) -> None:
    call, made = prepared(plan_us, sizes)
    assert call({"x": np.ones((5, 2), np.float32)})["y"].shape == (5, 2)
    assert [session.seen[-1] for session in made] == [5]


def test_calls_of_no_prepared_shape_run_as_they_are() -> None:
    call, made = prepared(100, [4, 2, 1])
    for shape in ((5, 2), (0, 2), (3, 7)):
        assert call({"x": np.ones(shape, np.float32)})["y"].shape == shape
    assert made[0].seen[-3:] == [5, 0, 3]


def test_without_memory_for_a_second_session_batches_are_filled_up_to_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call, made = prepared(100, [32, 8, 1], fails_from=1)
    assert "batches of 8 rows or fewer are filled up to 32" in caplog.text
    assert call({"x": np.ones((3, 2), np.float32)})["y"].shape == (3, 2)
    assert [session.seen[-1:] for session in made] == [[32], []]


def test_inputs_in_another_order_use_the_same_session() -> None:
    clock = [0]
    first = Session(clock, 100)
    call = BatchSizes(first, lambda: Session(clock, 100), lambda: clock[0])
    call.prepare({"x": np.zeros((n, 2)), "z": np.zeros((n, 3))} for n in (4, 1))
    call({"z": np.ones((3, 3)), "x": np.ones((3, 2))})
    assert first.seen[-1] == 4


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


TOO_LARGE = "Failed to allocate memory for requested buffer of size 4194304"
OVERFLOW = "safeint.h:17 SafeIntExceptionHandler<>::SafeIntOnOverflow() Integer overflow"


@pytest.mark.parametrize(
    ("device", "text", "kind", "says"),
    [
        ("cuda:0", "CUDA failure 700: an illegal access ; GPU=0", DeviceLost, "700"),
        ("cuda:0", "CUDA failure 2: out of memory ; GPU=0", OutOfMemory, "out of memory"),
        ("cuda:0", "CUDA failure 100: no CUDA-capable device", Unsupported, "CUDA error 100"),
        ("cuda:0", "CUDA failure 900: operation not permitted", Unsupported, "900"),
        ("cuda:0", TOO_LARGE, OutOfMemory, "4.0 MiB"),
        ("cpu", TOO_LARGE, OutOfMemory, r"does not fit into memory: 4\.0 MiB were needed"),
        # newer versions refuse such a graph; 1.23, the last for Python 3.10, fails as it opens it
        ("cpu", OVERFLOW, BadInput, "overflow"),
    ],
)
@pytest.mark.parametrize("raised", [ort_state.RuntimeException, RuntimeError])
def test_failures_keep_their_meaning(
    device: str, text: str, kind: type[Exception], says: str, raised: type[Exception]
) -> None:
    if kind is BadInput and raised is RuntimeError:
        raised = ort_state.RuntimeException
    with pytest.raises(kind, match=rf"m\.onnx: .*({says})") as caught:  # noqa: SIM117
        with onnxruntime_errors(Path("m.onnx"), device):
            raise raised(text)
    assert type(caught.value) is kind
    assert (device in str(caught.value)) or device == "cpu"


def test_libraries_of_wheels_in_any_folder_of_the_path_are_loaded_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str | None] = []

    def load(directory: str | None = None) -> None:
        sys.stdout.write("Failed to load one of another folder\n")
        calls.append(directory)

    folders = [tmp_path / "carried" / "nvidia" / name / "lib" for name in ("cu13", "cudnn")]
    for folder in folders:
        folder.mkdir(parents=True)
    paths = ["", str(tmp_path / "carried"), str(tmp_path / "none")]
    preload(SimpleNamespace(preload_dlls=load), paths)
    assert calls == [*map(str, folders), None]
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("Failed")) == ("", 1)
    preload(SimpleNamespace(), [])  # an older onnxruntime


def test_the_libraries_are_loaded_before_a_session_on_cuda_and_not_for_the_cpu(
    affine_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def session(*_: object, providers: list[Any], **__: object) -> None:
        calls.append(providers[0])
        raise RuntimeError("no GPU")

    monkeypatch.setattr(onnxruntime_engine, "preload", lambda _ort: calls.append("preload"))
    monkeypatch.setattr(ort, "InferenceSession", session)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    for device in ("cpu", "cuda:0"):
        with pytest.raises(Unsupported, match="no GPU"):
            open_engine(affine_onnx, device)
    # its default times every algorithm at each new batch size, under load
    options = {"device_id": "0", "cudnn_conv_algo_search": "HEURISTIC"}
    assert calls == ["CPUExecutionProvider", "preload", ("CUDAExecutionProvider", options)]


@pytest.mark.gpu
def test_batches_of_any_size_answer_as_on_the_cpu_after_a_servers_preparation(
    tmp_path: Path,
) -> None:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    path = save(mnist_like(), tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    calls = [np.zeros((rows, 1, 28, 28), np.float32) for rows in (32, 16, 8, 4, 2, 1)]
    with open_engine(path, "cuda") as gpu, open_engine(path, "cpu") as cpu:
        gpu.prepare(({"image": call} for call in calls), joined=True)
        for batch in (6, 26, 1, 32, 40, 0, 2, 6):
            feeds = {"image": random.random((batch, 1, 28, 28), dtype=np.float32)}
            got, wanted = gpu(feeds)["logits"], cpu(feeds)["logits"]
            np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)  # TF32 convolutions


@pytest.mark.gpu
def test_cuda_answers_as_the_cpu_does(tmp_path: Path) -> None:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    path = save(mnist_like(), tmp_path / "m.onnx")
    random = np.random.default_rng(0)
    with open_engine(path, "cuda") as gpu, open_engine(path, "cpu") as cpu:
        assert gpu.notes == ()  # every node on the GPU
        for batch in (1, 8, 3, 1, 8, 1, 8, 3):
            feeds = {"image": random.random((batch, 1, 28, 28), dtype=np.float32)}
            got, wanted = gpu(feeds)["logits"], cpu(feeds)["logits"]
            np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)  # TF32 convolutions
