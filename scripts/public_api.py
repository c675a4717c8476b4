"""Typical calls of the public API: never run, only read by mypy (`make lint`) and pyright."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from typing_extensions import assert_type

import deploykit as dk


def paths_are_strings_or_path_likes() -> None:
    assert_type(dk.export("model.pt"), dk.Made)
    assert_type(dk.export(Path("model.pt"), out="model.onnx"), dk.Made)


def a_live_module_goes_in_with_its_example(net: torch.nn.Module) -> None:
    example = torch.zeros(1, 3, 8, 8)
    assert_type(dk.export(net, example, out="net.onnx"), dk.Made)
    assert_type(dk.export(net, (example, example), out="net.onnx"), dk.Made)
    named = {"image": example}
    assert_type(dk.export(net, named, out="net.onnx", dynamic_axes={"image": {2: "H"}}), dk.Made)


def results_have_types() -> None:
    assert_type(dk.quantize("model.onnx", "fp16"), dk.Made)
    assert_type(dk.build("model.onnx", "cpu"), dk.Made)
    assert_type(dk.compare("a.onnx", Path("b.onnx")), dk.Compared)
    assert_type(dk.inspect("a.onnx"), dk.Inspection)
    assert_type(dk.predict("a.onnx", "data.npz", "out.npz"), dk.Predicted)
    assert_type(dk.predict_items("a.onnx", ["cat.jpg"]), dk.Answered)
    assert_type(dk.client("http://127.0.0.1:8000"), dk.ModelClient)
    assert_type(dk.profile("h200"), dk.Profile)
    assert_type(dk.bench("model.onnx"), dk.Report)
    assert_type(dk.compare_reports("before", Path("after")), dk.ReportComparison)
    assert_type(dk.load_test("http://127.0.0.1:8000"), dk.LoadResult)
    assert_type(dk.bundle("model.onnx", "l4", out="bundle"), dk.Bundled)
    assert_type(dk.doctor(), dk.Health)
    assert_type(dk.demo(quick=True), dk.DemoResult)


def an_engine_takes_and_returns_arrays() -> None:
    with dk.load("model.onnx", "cpu") as engine:
        assert_type(engine, dk.Engine)
        outputs = engine({"image": np.zeros((1, 1, 28, 28), np.float32)})
        assert_type(outputs, "dict[str, np.ndarray]")
        assert_type(engine.inputs, "tuple[dk.TensorSpec, ...]")


def a_server_is_a_context_manager() -> None:
    dk.serve("model.onnx", workers="shared:2").close()
    with dk.serve({"digits": "model.onnx"}, workers=2, buckets={"T": [16, 32]}) as server:
        assert_type(server, dk.RunningServer)
        assert_type(server.url, str)
        assert_type(server.grpc_url, "str | None")
        assert_type(server.close(), int)


def errors_form_a_tree() -> None:
    try:
        dk.load("missing.onnx")
    except dk.NotFound as exc:
        assert_type(exc.hint, "str | None")
        wrong: dk.BadInput = exc
        base: dk.DeploykitError = wrong
        assert_type(base.message, str)


def wrong_calls_are_found() -> None:
    dk.export("model.pt", batch=dk)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    dk.serve("model.onnx", max_bach=8)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    dk.export("model.pt", missing=1)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    dk.nothing  # type: ignore[attr-defined] # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]
