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

_MODULES = {  # module -> its public names
    "benchmarking.bench": "bench",
    "building.build": "build",
    "building.builder": "Shapes",
    "core.artefact": "Artefact",
    "core.errors": "BadInput DeploykitError GateFailed MissingExtra NotFound Unsupported",
    "core.profile": "Profile",
    "core.recipe": "Recipe Split Splits",
    "core.task": "ImageInput",
    "core.tensors": "TensorSpec parse_spec",
    "demonstration": "DemoResult demo",
    "deploying.bundle": "Bundled bundle",
    "engines.data.folders": "class_splits",
    "engines.engine": "Engine load",
    "evaluation.artefacts": "Made",
    "evaluation.compare": "Compared compare",
    "evaluation.doctor": "Health doctor",
    "evaluation.inspect": "Inspection inspect",
    "evaluation.predict": "Answered Predicted predict predict_items",
    "exporting.export": "export",
    "loadtest.load": "load_test",
    "pipelines.pipeline": "OpenPipeline pipeline",
    "planning.plan": "Planned plan",
    "quantization.quantize": "quantize",
    "reporting.compare": "ReportComparison compare_reports",
    "reporting.report": "LoadResult Report",
    "serving.client": "ModelClient client",
    "serving.running_server": "RunningServer",
    "serving.serve": "serve",
    "training.train": "train",
}
_PUBLIC = {
    name: f"deploykit.{module}:{name}"
    for module, names in _MODULES.items()
    for name in names.split()
}
_PUBLIC["profile"] = "deploykit.core.profile:load_profile"

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
    from deploykit.reporting.report import LoadResult, Report
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
