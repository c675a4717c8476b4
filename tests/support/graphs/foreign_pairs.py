"""Graphs whose INT8 pairs another tool placed for TensorRT."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploykit.graph.graph import Graph
from tests.support.graphs.data import feeds
from tests.support.onnx_zoo import save

OPERATORS = ["Conv", "Gemm", "MatMul"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    logging.disable(logging.NOTSET)


def written_by_onnxruntime(
    model: onnx.ModelProto, tmp_path: Path, activation_type: str = "QInt8", **options: object
) -> Graph:
    """By quantize_static, with the options that TensorRT's parser accepts."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    inputs = feeds(model, 32)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        left = iter([inputs])

        def get_next(self) -> Mapping[str, np.ndarray] | None:
            return next(self.left, None)

    out = tmp_path / "foreign.onnx"
    kinds = quantization.QuantType
    with quiet():
        quantization.quantize_static(
            save(model, tmp_path / "float.onnx"),
            out,
            Reader(),
            per_channel=True,
            activation_type=kinds[activation_type],
            weight_type=kinds.QInt8,
            op_types_to_quantize=OPERATORS,
            extra_options={
                "ActivationSymmetric": True,
                "QuantizeBias": False,
                "OpTypesToExcludeOutputQuantization": OPERATORS,
                **options,
            },
        )
    return Graph.open(out)
