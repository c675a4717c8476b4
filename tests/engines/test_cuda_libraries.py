"""NVIDIA's wheels are found wherever they are on sys.path, before the CUDA provider is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.core.errors import Unsupported
from deploykit.engines.onnxruntime import engine
from deploykit.engines.onnxruntime.engine import preload

CU13 = (
    "cu13/lib/libcudart.so.13",
    "cu13/lib/libnvrtc.so.13",
    "cu13/lib/libcublasLt.so.13",
    "cu13/lib/libcublas.so.13",
    "cu13/lib/libcurand.so.10",
    "cudnn/lib/libcudnn.so.9",
)


def wheels(folder: Path, *names: str) -> str:
    for name in names:
        path = folder / "nvidia" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(folder)


def test_libraries_in_another_folder_of_the_path_are_loaded_in_their_order(tmp_path: Path) -> None:
    """`nvidia/*/lib` as the wheels of CUDA 13 lay it out; CUDA 12's next to them are left out."""
    calls: list[str] = []
    ort = SimpleNamespace(
        __file__=str(tmp_path / "site" / "onnxruntime" / "__init__.py"),
        cuda_version="13.0",
        preload_dlls=lambda: calls.append("onnxruntime"),
    )
    other = wheels(tmp_path / "carried", *CU13, "cuda_runtime/lib/libcudart.so.12")
    beside = wheels(tmp_path / "site", "cu13/lib/libcudart.so.13")
    preload(ort, ["", beside, other, str(tmp_path / "none")], calls.append)
    assert calls == [*(f"{other}/nvidia/{name}" for name in CU13), "onnxruntime"]


def test_a_library_that_does_not_load_is_left_to_onnxruntime(tmp_path: Path) -> None:
    def fails(path: str) -> None:
        raise OSError(f"{path}: invalid ELF header")

    calls: list[int] = []
    ort = SimpleNamespace(
        __file__="/none/onnxruntime/__init__.py",
        cuda_version="13.0",
        preload_dlls=lambda: calls.append(1),
    )
    preload(ort, [wheels(tmp_path, *CU13)], fails)
    assert calls == [1]


def test_an_onnxruntime_without_preloading_is_left_alone() -> None:
    preload(SimpleNamespace(), [], lambda path: pytest.fail(path))


def test_the_libraries_are_loaded_before_a_session_on_cuda_and_not_for_the_cpu(
    affine_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def session(*_: object, providers: list[Any], **__: object) -> None:
        calls.append("session")
        asked.append(providers[0])
        raise RuntimeError("no GPU")

    asked: list[Any] = []

    monkeypatch.setattr(engine, "preload", lambda _ort: calls.append("preload"))
    monkeypatch.setattr(engine.ort, "InferenceSession", session)
    for device in ("cpu", "cuda:0"):
        with pytest.raises(Unsupported, match="no GPU"):
            engine._session(affine_onnx, device, None, optimise=True)
    assert calls == ["session", "preload", "session"]
    # its default times every algorithm at each new batch size, under load
    options = {"device_id": "0", "cudnn_conv_algo_search": "HEURISTIC"}
    assert asked == ["CPUExecutionProvider", ("CUDAExecutionProvider", options)]
