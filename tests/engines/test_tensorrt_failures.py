"""What the TensorRT runtime refuses, at load and in a call, and what it says of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import MissingExtra, OutOfMemory, Unsupported
from deploykit.core.extras import installed
from deploykit.engines.cuda.errors import CaptureRefused, DeviceLost
from deploykit.engines.tensorrt.log import logger, recorder
from tests.support.runtimes.fake_tensorrt import FakeTensorRt, replaced, tensor
from tests.support.runtimes.own_cuda import FakeCuda, rows
from tests.support.runtimes.tensorrt_opened import Opened, X, opened_fixture  # noqa: F401

NOISE = (
    "getDeviceMemorySizeV2 is only supported from TensorRT 10.1 onwards"  # lean 10.16.1, at load
)
RUNS = "execute_async_v3"
LOADS = {
    "deserialize_cuda_engine": "deserialize_cuda_engine",
    "Runtime": "Runtime",
    "create_execution_context": "create_execution_context",
    "set_optimization_profile_async": "optimisation profile 0",
    "set_input_shape": "shape .* of input 'x'",
    "infer_shapes": "shapes",
    "set_tensor_address": "address of tensor",
}
CALLS = [*[*LOADS][2:], "get_tensor_shape", RUNS]


@pytest.mark.parametrize("call", LOADS)
def test_refusal_at_load_gives_the_reason_from_the_log(call: str) -> None:
    line = "[runtime.cpp::deserialize::1] IRuntime: Error Code 1: the reason"
    with pytest.raises(Unsupported, match=rf"m\.trt: .*{LOADS[call]}.*: the reason") as caught:
        Opened(fail={call: line})
    assert "runtime.cpp" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("the reason", Unsupported),
        ("Cuda Runtime (out of memory)", OutOfMemory),
        ("Cuda Runtime (an illegal memory access was encountered)", DeviceLost),
        ("Cuda Runtime (operation not permitted when stream is capturing)", CaptureRefused),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_refused_call_has_the_reason_of_the_log_and_the_next_call_works(
    opened: Opened, call: str, text: str, kind: type[Unsupported]
) -> None:
    """Whether the bindings of this member return None, False or raise.

    In the slot of a second call, as the first one has its context since the engine is open.
    """
    first = opened.engine.submit({"x": rows(3)})
    opened.nv.fail = {call: f"[a.cpp::enqueue::1] Error Code 1: {text}"}
    with pytest.raises(kind, match=r"m\.trt: ") as caught:
        opened.engine({"x": rows(2)})
    assert type(caught.value) is kind
    if kind is Unsupported:
        assert caught.value.message.endswith("the reason")
    if kind is not DeviceLost:
        np.testing.assert_array_equal(first.result()["y"], 2 * rows(3) + 1)
        np.testing.assert_array_equal(opened.engine({"x": rows(2)})["y"], 2 * rows(2) + 1)


@pytest.mark.parametrize("line", ["", "[a.cpp::b::1] Error Code 1: Myelin (it failed)"])
@pytest.mark.parametrize("call", CALLS)
def test_a_lost_device_is_found_whatever_tensorrt_gives_as_reason(call: str, line: str) -> None:
    found = Opened()
    found.engine.submit({"x": rows(3)})
    found.nv.fail = {call: line or "?"}
    report = found.nv.report

    def lose(text: str, owner: Any = None) -> None:
        if text:
            found.cuda.lost = "IllegalAddress"
            report(line, owner)

    def use() -> None:
        found.engine.prepare()
        found.engine({"x": rows(2)})

    found.nv.report = lose  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(DeviceLost):
            use()
    found.engine.close()


@pytest.mark.parametrize(
    ("line", "kind"),
    [  # as TensorRT for RTX 1.7 and TensorRT 8.6 wrote them, and texts in the binaries of 10 and 11
        ("Myelin ([exec.cpp:1509: exec] CUDA error 700 launching __myl_Relu kernel", DeviceLost),
        ("initializing cuDNN: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", OutOfMemory),
        ("Error Code 2: OutOfMemory (Requested size was 1073741824 bytes.)", OutOfMemory),
        ("Requested amount of GPU memory (4096 bytes) could not be allocated.", OutOfMemory),
        ("CUDA initialization failure with error: 719", DeviceLost),
    ],
)
def test_errors_of_other_libraries_keep_their_meaning(
    opened: Opened, line: str, kind: type[Unsupported]
) -> None:
    opened.nv.fail = {RUNS: line}
    with pytest.raises(kind, match=r"m\.trt: cuda:0"):
        opened.engine({"x": rows(2)})


@pytest.mark.parametrize(
    "call", ["deserialize_cuda_engine", "set_input_shape", "set_tensor_address"]
)
def test_an_error_line_of_a_call_that_succeeded_is_not_the_reason(call: str) -> None:
    opened = Opened(noise={call: NOISE})
    opened.nv.fail = {RUNS: "the reason\n  followed by\n  a dump of the graph"}
    with pytest.raises(Unsupported, match=r"the reason$"):
        opened.engine({"x": rows(2)})


def test_an_inspector_or_an_allocator_that_is_refused_is_a_deploykit_error() -> None:
    late = Opened((X, tensor("y", "OUTPUT", [-1, 4], late=True)))
    late.nv.fail = {"create_engine_inspector": "the reason"}
    with pytest.raises(Unsupported, match="the reason"):
        late.engine.layer_information()
    late.engine.submit({"x": rows(2)})
    late.nv.fail = {"set_output_allocator": "the reason"}
    with pytest.raises(Unsupported, match=r"depends on the data.*the reason"):
        late.engine({"x": rows(3)})
    late.engine.close()


def test_tensorrt_can_read_its_errors_back_from_the_recorder() -> None:
    """Its C++ side calls `get_num_errors`, where NVIDIA's documents have `num_errors`."""
    kept = recorder(FakeTensorRt())()
    kept.report_error("INTERNAL_ERROR", "the reason")
    assert kept.get_num_errors() == kept.num_errors() == 1
    assert [kept.get_error_code(0), kept.get_error_desc(0)] == ["INTERNAL_ERROR", "the reason"]
    assert not kept.has_overflowed()
    kept.clear()
    assert kept.get_num_errors() == 0


def test_runtime_engine_and_context_report_each_to_a_recorder_of_its_own(opened: Opened) -> None:
    """TensorRT ignores every logger but the first: there is one for the process."""
    nv = FakeTensorRt(FakeCuda(new_machine=False))
    assert logger(nv) is logger(nv)
    opened.engine({"x": rows(2)})
    owners = (opened.engine._runtime, opened.engine._engine, opened.nv.contexts[0])
    assert None not in [owner.error_recorder for owner in owners]
    for owner in owners:
        opened.nv.report(NOISE, owner)
    opened.nv.fail = {RUNS: "the reason"}
    with pytest.raises(Unsupported, match=r"the reason$"):
        opened.engine({"x": rows(2)})


def test_an_engine_built_for_a_dla_core_runs_on_it(opened: Opened) -> None:
    assert opened.nv.does.seen["runtime_dla"] == -1
    other = Opened(dla=1)
    assert other.nv.does.seen["runtime_dla"] == 1
    other.engine.close()


@pytest.mark.parametrize(
    ("line", "says"), [("Error Code 1: Myelin (it failed)", "it failed"), ("", "no reason in its")]
)
def test_a_library_below_tensorrt_writes_to_the_logger_or_says_nothing(
    opened: Opened, line: str, says: str
) -> None:
    opened.nv.fail = {RUNS: line or " "}
    opened.nv.recorded = False
    if not line:
        opened.nv.report = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match=says):
        opened.engine({"x": rows(2)})


# the module that owns TensorRT


@pytest.mark.parametrize(
    ("content", "major"),
    [(b"\0libcudart.so.12\0", "12"), (b"libcudart.so.13", "13"), (b"static", "")],
)
def test_tensorrt_that_is_not_from_pip_names_its_cuda_by_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, major: str
) -> None:
    """As NVIDIA's Debian packages and images have it: no record of pip's is there."""
    library = tmp_path / "libnvinfer.so.10.3.0"
    library.write_bytes(content)
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 0000 08:01 12   {library}\n7f02-7f03 rw-p 0 0:0 0 [heap]\n")
    with replaced("tensorrt", FakeTensorRt()):
        opening = importlib.import_module("deploykit.engines.tensorrt.open")
        monkeypatch.setattr(opening, "_MAPS", maps)
        monkeypatch.setattr(opening, "_LIBRARIES", ())
        assert opening.tensorrt_cuda() == major
        machine = opening.here(FakeCuda())
    assert machine.facts().get("cuda", "") == major  # never that of the driver


@pytest.mark.parametrize(("majors", "known"), [(["12"], "12"), (["12", "13"], "")], ids=str)
def test_tensorrt_from_pip_names_its_cuda_by_its_package(
    monkeypatch: pytest.MonkeyPatch, majors: list[str], known: str
) -> None:
    def version(name: str) -> str:
        if name.rpartition("cu")[2] in majors:
            return "10.13.3.9"
        raise importlib.metadata.PackageNotFoundError(name)

    with replaced("tensorrt", FakeTensorRt()):
        opening = importlib.import_module("deploykit.engines.tensorrt.open")
        monkeypatch.setattr(importlib.metadata, "version", version)
        assert opening.tensorrt_cuda() == known


def test_without_tensorrt_the_error_says_how_to_install_it() -> None:
    if installed("tensorrt") or installed("tensorrt_lean"):
        pytest.skip("tensorrt is installed")
    with pytest.raises(MissingExtra, match="tensorrt is not installed"):
        importlib.import_module("deploykit.engines.tensorrt.open")


@pytest.mark.nvidia
def test_what_the_real_module_refuses(tmp_path: Path) -> None:
    if not installed("tensorrt"):
        pytest.skip("tensorrt is not installed")
    module = importlib.import_module("deploykit.engines.tensorrt.open")
    with pytest.raises(Unsupported, match=r"TensorRT 8\.6\.1 is installed"):
        module.check_version("8.6.1", full=True)
    with pytest.raises(Unsupported, match="lean runtime"):
        module.check_version("10.3.0", full=False)
    for version in ("10.3.0", "10.13.3.9.post1", "11.4.0.106"):
        module.check_version(version, full=True)
    with pytest.raises(Unsupported, match="runs on a GPU only"):
        module.open_engine(tmp_path / "m.trt", "cpu")
    if not shutil.which("nvidia-smi"):  # before the plan is read
        with pytest.raises(Unsupported, match="no NVIDIA driver"):
            module.open_engine(tmp_path / "m.trt")
