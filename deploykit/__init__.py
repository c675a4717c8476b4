"""From a PyTorch model to fast, proven inference: `import deploykit as dk`, then `dk.export(...)`.

Importing this imports nothing else: each name is loaded on first use. Type checkers and editors
read the imports below, which name the same objects as `_PUBLIC`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # checkers take it for true; importing typing costs more than all else here

__version__ = "0.1.0"

__all__ = [
    "Answered",
    "Artefact",
    "BadInput",
    "Bundled",
    "Compared",
    "DemoResult",
    "DeploykitError",
    "Engine",
    "GateFailed",
    "Health",
    "Inspection",
    "LoadResult",
    "Made",
    "MissingExtra",
    "ModelClient",
    "NotFound",
    "OpenPipeline",
    "Planned",
    "Predicted",
    "Profile",
    "Report",
    "ReportComparison",
    "RunningServer",
    "Shapes",
    "TensorSpec",
    "Unsupported",
    "bench",
    "build",
    "bundle",
    "client",
    "compare",
    "compare_reports",
    "demo",
    "doctor",
    "export",
    "inspect",
    "load",
    "load_test",
    "pipeline",
    "plan",
    "predict",
    "predict_items",
    "profile",
    "quantize",
    "serve",
    "train",
]

_PUBLIC = {
    "Answered": "deploykit.api.predict_items:Answered",
    "Artefact": "deploykit.core.artefact:Artefact",
    "BadInput": "deploykit.core.errors:BadInput",
    "Bundled": "deploykit.api.bundle:Bundled",
    "Compared": "deploykit.api.compare:Compared",
    "DemoResult": "deploykit.api.demo:DemoResult",
    "DeploykitError": "deploykit.core.errors:DeploykitError",
    "Engine": "deploykit.runtimes.engine:Engine",
    "GateFailed": "deploykit.core.errors:GateFailed",
    "Health": "deploykit.api.doctor:Health",
    "Inspection": "deploykit.api.inspect:Inspection",
    "LoadResult": "deploykit.measure.load.result:LoadResult",
    "Made": "deploykit.api.artefacts:Made",
    "MissingExtra": "deploykit.core.errors:MissingExtra",
    "ModelClient": "deploykit.api.client:ModelClient",
    "NotFound": "deploykit.core.errors:NotFound",
    "OpenPipeline": "deploykit.pipelines.run:OpenPipeline",
    "Planned": "deploykit.api.plan:Planned",
    "Predicted": "deploykit.api.predict:Predicted",
    "Profile": "deploykit.core.profile:Profile",
    "Report": "deploykit.measure.report.report:Report",
    "ReportComparison": "deploykit.measure.report.compare:ReportComparison",
    "RunningServer": "deploykit.api.running_server:RunningServer",
    "Shapes": "deploykit.builders.builder:Shapes",
    "TensorSpec": "deploykit.core.tensors:TensorSpec",
    "Unsupported": "deploykit.core.errors:Unsupported",
    "bench": "deploykit.api.bench:bench",
    "build": "deploykit.api.build:build",
    "bundle": "deploykit.api.bundle:bundle",
    "client": "deploykit.api.client:client",
    "compare": "deploykit.api.compare:compare",
    "compare_reports": "deploykit.api.compare_reports:compare_reports",
    "demo": "deploykit.api.demo:demo",
    "doctor": "deploykit.api.doctor:doctor",
    "export": "deploykit.api.export:export",
    "inspect": "deploykit.api.inspect:inspect",
    "load": "deploykit.runtimes.engine:load",
    "load_test": "deploykit.api.load_test:load_test",
    "pipeline": "deploykit.api.pipeline:pipeline",
    "plan": "deploykit.api.plan:plan",
    "predict": "deploykit.api.predict:predict",
    "predict_items": "deploykit.api.predict_items:predict_items",
    "profile": "deploykit.core.profile:load_profile",
    "quantize": "deploykit.api.quantize:quantize",
    "serve": "deploykit.api.serve:serve",
    "train": "deploykit.api.train:train",
}

if TYPE_CHECKING:
    from deploykit.api.artefacts import Made
    from deploykit.api.bench import bench
    from deploykit.api.build import build
    from deploykit.api.bundle import Bundled, bundle
    from deploykit.api.client import ModelClient, client
    from deploykit.api.compare import Compared, compare
    from deploykit.api.compare_reports import compare_reports
    from deploykit.api.demo import DemoResult, demo
    from deploykit.api.doctor import Health, doctor
    from deploykit.api.export import export
    from deploykit.api.inspect import Inspection, inspect
    from deploykit.api.load_test import load_test
    from deploykit.api.pipeline import pipeline
    from deploykit.api.plan import Planned, plan
    from deploykit.api.predict import Predicted, predict
    from deploykit.api.predict_items import Answered, predict_items
    from deploykit.api.quantize import quantize
    from deploykit.api.running_server import RunningServer
    from deploykit.api.serve import serve
    from deploykit.api.train import train
    from deploykit.builders.builder import Shapes
    from deploykit.core.artefact import Artefact
    from deploykit.core.errors import (
        BadInput,
        DeploykitError,
        GateFailed,
        MissingExtra,
        NotFound,
        Unsupported,
    )
    from deploykit.core.profile import Profile
    from deploykit.core.profile import load_profile as profile
    from deploykit.core.tensors import TensorSpec
    from deploykit.measure.load.result import LoadResult
    from deploykit.measure.report.compare import ReportComparison
    from deploykit.measure.report.report import Report
    from deploykit.pipelines.run import OpenPipeline
    from deploykit.runtimes.engine import Engine, load
else:

    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'deploykit' has no attribute '{name}'")
        from importlib import import_module

        module, _, attribute = _PUBLIC[name].partition(":")
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
