"""Each operator of onnx's own node tests, in each opset of its schema: cast and compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import defs

import deploykit as dk
from tests.support.campaign import only_in_a_campaign

FEWEST = 400  # models; there were 448 of 191 operators in onnx 1.23
LEAST_DB = 15.0


def models() -> Iterator[tuple[onnx.ModelProto, dict[str, np.ndarray], list[np.ndarray]]]:
    """Yield one model for each operator and opset that ONNX Runtime runs, its feeds and answers."""
    from onnx.backend.test.case.node import collect_testcases

    schemas, seen = defs.get_all_schemas_with_history(), set[tuple[str, int]]()
    for case in collect_testcases(None):
        if case.model is None or not case.data_sets or not case.model.graph.node:
            continue
        kind, inputs = case.model.graph.node[0].op_type, case.data_sets[0][0]
        feeds = {v.name: a for v, a in zip(case.model.graph.input, inputs, strict=False)}
        versions = {each.since_version for each in schemas if each.name == kind}
        for version in sorted(each for each in versions if each >= 7 and (kind, each) not in seen):
            model = onnx.ModelProto()
            model.CopyFrom(case.model)
            for each in model.opset_import:
                each.version = each.version if each.domain else version
            model.ir_version = min(10, max(model.ir_version, 4))
            try:
                onnx.checker.check_model(model, full_check=True)
                wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
            except Exception:  # noqa: BLE001 - not of that opset, or not ONNX Runtime's
                continue
            seen.add((kind, version))
            yield model, feeds, wanted


@only_in_a_campaign
@pytest.mark.filterwarnings("ignore")  # onnx's own cases overflow on purpose
def test_each_operator_is_cast_or_refused_and_what_is_written_computes_the_same(
    tmp_path: Path,
) -> None:
    path, count, wrong = tmp_path / "m.onnx", 0, []
    for model, feeds, wanted in models():
        count += 1
        onnx.save(model, path)
        dk.inspect(path)
        try:
            made = dk.quantize(path, "fp16", force=True)
        except (dk.BadInput, dk.GateFailed, dk.Unsupported):
            continue
        answers = onnxruntime.InferenceSession(made.path).run(None, feeds)
        for want, got in zip(wanted, answers, strict=True):
            if isinstance(want, np.ndarray) and want.dtype.kind == "f" and want.size:
                x, y = want.astype(np.float64), got.astype(np.float64)
                if ((x - y) ** 2).sum() > (x**2).sum() * 10 ** (-LEAST_DB / 10):
                    wrong.append(f"{model.graph.name}, opset {model.opset_import[0].version}")
    assert count >= FEWEST
    assert wrong == []
