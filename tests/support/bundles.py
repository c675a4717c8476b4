"""A model as `export` leaves it, without torch, and starts of its bundle without processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from deploykit.core.artefact import write_manifest
from deploykit.core.evidence import Evidence
from deploykit.core.profile import load_profile
from deploykit.deploying.boot import Boot, Booted, EngineCache, build_and_prove
from deploykit.deploying.device import read_gpu
from deploykit.deploying.folder import read_bundle
from deploykit.engines.engine import load
from deploykit.evaluation import golden
from deploykit.evaluation.artefacts import onnx_manifest
from deploykit.graph.graph import Graph
from tests.support.onnx_zoo import linear, save


def flip(path: Path) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def proven_model(
    path: Path, model: onnx.ModelProto | None = None, *, external: bool = False
) -> Path:
    """Write `linear()`, or `model`, to `path`, with what `bundle` needs next to it.

    `external`: its weights in a second file, as those of a model above 2 GiB.
    """
    model = model or linear()
    if external:
        apart = {"save_as_external_data": True, "location": f"{path.name}.data"}
        onnx.save(model, path, size_threshold=0, **apart)
    else:
        save(model, path)
    with load(path, "cpu") as engine:
        feeds = {
            spec.name: np.random.default_rng(0)
            .normal(size=[4 if isinstance(n, str) else n for n in spec.shape])
            .astype(np.float32)
            for spec in engine.inputs
        }
        samples = golden.record(engine, feeds, path)
    evidence = Evidence(golden=samples)
    write_manifest(path, onnx_manifest(Graph.open(path), (), tools=("onnx",), evidence=evidence))
    return path


def inline(_what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """`run_apart` without another process."""
    options.pop("inherit")
    report = options.pop("on_progress", None) or (lambda _what, _share: None)
    return function(*arguments, report)


def building(build: Callable[[Path], None]) -> Callable[..., Any]:
    """In place of `run_apart`: `build` fills a slot, and a proof passes."""

    def run(_what: str, function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
        if function is read_gpu:
            return read_gpu(*arguments)
        if function is build_and_prove:
            build(arguments[-1].parent)
        return ()

    return run


def copying(engines: Path) -> Callable[..., Any]:
    """In place of `run_apart`: a build copies the files of `engines`."""

    def copy(slot: Path) -> None:
        for file in sorted(engines.iterdir()):
            shutil.copyfile(file, slot / file.name)

    return building(copy)


def failing(error: BaseException) -> Callable[..., Any]:
    """In place of `run_apart`: a build fails."""

    def fail(_slot: Path) -> None:
        raise error

    return building(fail)


def boot(bundle: Path, cache: Path, run: Callable[..., Any] = inline, **options: Any) -> Booted:
    """Start as `boot_until_stopped` does, become ready, and end; what would have been served."""
    profile = load_profile(read_bundle(bundle).profile)
    started = Boot(bundle, profile, EngineCache(cache), run=run, **options)
    with started.prepare() as engine:
        assert engine.is_file()
        return started.confirm()
