"""From a PyTorch model to fast, proven inference: `import deploykit as dk`, then `dk.export(...)`.

Importing this imports nothing else: each name is loaded on first use. Type checkers and editors
read the imports below, which name the same objects as `_PUBLIC`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers assume True; importing typing costs more than the rest

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
    "ImageInput",
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
    "Recipe",
    "Report",
    "ReportComparison",
    "RunningServer",
    "Shapes",
    "Split",
    "Splits",
    "TensorSpec",
    "Unsupported",
    "bench",
    "build",
    "bundle",
    "class_splits",
    "client",
    "compare",
    "compare_reports",
    "demo",
    "doctor",
    "export",
    "inspect",
    "load",
    "load_test",
    "parse_spec",
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
    "Answered": "deploykit.evaluation.predict:Answered",
    "Artefact": "deploykit.core.artefact:Artefact",
    "BadInput": "deploykit.core.errors:BadInput",
    "Bundled": "deploykit.deploying.bundle:Bundled",
    "Compared": "deploykit.evaluation.compare:Compared",
    "DemoResult": "deploykit.demonstration:DemoResult",
    "DeploykitError": "deploykit.core.errors:DeploykitError",
    "Engine": "deploykit.engines.engine:Engine",
    "GateFailed": "deploykit.core.errors:GateFailed",
    "Health": "deploykit.evaluation.doctor:Health",
    "ImageInput": "deploykit.core.task:ImageInput",
    "Inspection": "deploykit.evaluation.inspect:Inspection",
    "LoadResult": "deploykit.reporting.points:LoadResult",
    "Made": "deploykit.evaluation.artefacts:Made",
    "MissingExtra": "deploykit.core.errors:MissingExtra",
    "ModelClient": "deploykit.serving.client:ModelClient",
    "NotFound": "deploykit.core.errors:NotFound",
    "OpenPipeline": "deploykit.pipelines.pipeline:OpenPipeline",
    "Planned": "deploykit.planning.plan:Planned",
    "Predicted": "deploykit.evaluation.predict:Predicted",
    "Profile": "deploykit.core.profile:Profile",
    "Recipe": "deploykit.core.recipe:Recipe",
    "Report": "deploykit.reporting.report:Report",
    "ReportComparison": "deploykit.reporting.compare:ReportComparison",
    "RunningServer": "deploykit.serving.running_server:RunningServer",
    "Shapes": "deploykit.building.builder:Shapes",
    "Split": "deploykit.core.recipe:Split",
    "Splits": "deploykit.core.recipe:Splits",
    "TensorSpec": "deploykit.core.tensors:TensorSpec",
    "Unsupported": "deploykit.core.errors:Unsupported",
    "bench": "deploykit.benchmarking.bench:bench",
    "build": "deploykit.building.build:build",
    "bundle": "deploykit.deploying.bundle:bundle",
    "class_splits": "deploykit.engines.data.folders:class_splits",
    "client": "deploykit.serving.client:client",
    "compare": "deploykit.evaluation.compare:compare",
    "compare_reports": "deploykit.reporting.compare:compare_reports",
    "demo": "deploykit.demonstration:demo",
    "doctor": "deploykit.evaluation.doctor:doctor",
    "export": "deploykit.exporting.export:export",
    "inspect": "deploykit.evaluation.inspect:inspect",
    "load": "deploykit.engines.engine:load",
    "load_test": "deploykit.loadtest.load:load_test",
    "parse_spec": "deploykit.core.tensors:parse_spec",
    "pipeline": "deploykit.pipelines.pipeline:pipeline",
    "plan": "deploykit.planning.plan:plan",
    "predict": "deploykit.evaluation.predict:predict",
    "predict_items": "deploykit.evaluation.predict:predict_items",
    "profile": "deploykit.core.profile:load_profile",
    "quantize": "deploykit.quantization.quantize:quantize",
    "serve": "deploykit.serving.serve:serve",
    "train": "deploykit.training.train:train",
}

if TYPE_CHECKING:
    from deploykit.benchmarking.bench import bench
    from deploykit.building.build import build
    from deploykit.building.builder import Shapes
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
    from deploykit.core.recipe import Recipe, Split, Splits
    from deploykit.core.task import ImageInput
    from deploykit.core.tensors import TensorSpec, parse_spec
    from deploykit.demonstration import DemoResult, demo
    from deploykit.deploying.bundle import Bundled, bundle
    from deploykit.engines.data.folders import class_splits
    from deploykit.engines.engine import Engine, load
    from deploykit.evaluation.artefacts import Made
    from deploykit.evaluation.compare import Compared, compare
    from deploykit.evaluation.doctor import Health, doctor
    from deploykit.evaluation.inspect import Inspection, inspect
    from deploykit.evaluation.predict import Answered, Predicted, predict, predict_items
    from deploykit.exporting.export import export
    from deploykit.loadtest.load import load_test
    from deploykit.pipelines.pipeline import OpenPipeline, pipeline
    from deploykit.planning.plan import Planned, plan
    from deploykit.quantization.quantize import quantize
    from deploykit.reporting.compare import ReportComparison, compare_reports
    from deploykit.reporting.points import LoadResult
    from deploykit.reporting.report import Report
    from deploykit.serving.client import ModelClient, client
    from deploykit.serving.running_server import RunningServer
    from deploykit.serving.serve import serve
    from deploykit.training.train import train
else:

    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'deploykit' has no attribute '{name}'")
        from importlib import import_module

        module, _, attribute = _PUBLIC[name].partition(":")
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
