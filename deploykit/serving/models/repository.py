"""The served models by name, with their shared resources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deploykit import __version__
from deploykit.core.errors import BadInput, NotFound, quote
from deploykit.engines.engine import Engine
from deploykit.serving.batching.batcher import Loop, countdown
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.pipelines import PipelineGraph, ServedPipeline
from deploykit.serving.observe.metrics import Sample, Sampler
from deploykit.serving.options import VERSION, ServeOptions
from deploykit.serving.shared_memory import SharedMemory

__all__ = ["VERSION", "ModelRepository", "ServeOptions", "Served", "ServedModel", "ServedPipeline"]

Served = ServedModel | ServedPipeline

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "statistics",
)


class ModelRepository:
    """Models by name, for requests of `loop`. `make_model` replaces the class ServedModel.

    The caller closes the engines after `close`, except those passed to `ServedModel.replace`.
    """

    def __init__(
        self,
        models: Mapping[str, Engine | Sequence[Engine]],
        options: ServeOptions,
        loop: Loop | None = None,
        *,
        make_model: Callable[..., ServedModel] = ServedModel,
    ) -> None:
        self.options = options
        self.leaving = False  # whether it reports not ready, although requests are still accepted
        self.draining = False  # see `drain`
        self.elsewhere: str | None = None  # why another process of this server is not ready
        self.models: dict[str, ServedModel] = {}
        self.pipelines: dict[str, ServedPipeline] = {}  # their models are among `models`
        self.memory: SharedMemory | None = None
        if options.shared_memory:
            self.memory = SharedMemory(options.max_body_bytes)
        self.sampler = Sampler()
        self._samples: list[Callable[[], Iterable[Sample]]] = [self.sampler.samples]
        try:
            for name, engines in models.items():
                several = engines if isinstance(engines, Sequence) else [engines]
                self.models[name] = make_model(name, several, options, loop or Loop())
            served = [model.buckets for model in self.models.values() if model.buckets]
            why, hint = "no served model has an input with", "deploykit inspect shows the axes"
            for axis in options.lengths:
                if not any(axis in buckets.lengths for buckets in served):
                    raise BadInput(f"`buckets` {axis}: {why} that axis, and a batch", hint=hint)
            for name in options.pad:
                if not any(name in buckets.fill for buckets in served):
                    raise BadInput(f"`pad` {name}: {why} that name that is padded", hint=hint)
        except BaseException:
            self.close(drain=False)
            raise

    def add_pipelines(
        self, graphs: Mapping[str, PipelineGraph], loop: asyncio.AbstractEventLoop, processes: int
    ) -> None:
        """Serve pipelines of these models by name."""
        shared = self.options, self.memory, loop, processes
        for name, (graph, models) in graphs.items():
            stages = {stage: self.models[model] for stage, model in models.items()}
            self.pipelines[name] = ServedPipeline(name, graph, stages, *shared)

    def warm_up(self) -> None:
        """Run each engine at every expected shape, before the first request.

        Raises if an engine fails, or if padding changes its outputs.
        """
        for model in self.models.values():
            model.warm_up()
        self.sampler.latest()  # so that the first scrape includes the process and the GPUs

    def find(self, name: str, version: str = VERSION) -> ServedModel:
        """Return a model. Raises NotFound."""
        model = self.models.get(name)
        if model is not None and version == VERSION:
            return model
        hint = f"served here: {', '.join(self.served)} (version {VERSION})"
        if model is None and name not in self.pipelines:
            raise NotFound(f"there is no model {quote(name)}", hint=hint)
        raise NotFound(f"model '{name}' has no version {quote(version)}", hint=hint)

    @property
    def served(self) -> dict[str, Served]:
        return {**self.pipelines, **self.models}

    def find_any(self, name: str, version: str = VERSION) -> Served:
        pipeline = self.pipelines.get(name) if version == VERSION else None
        return pipeline or self.find(name, version)

    def expire(self) -> None:
        for model in self.models.values():
            model.batcher.expire()

    @property
    def fatal(self) -> str | None:
        """Return why this process cannot continue to serve and must end; None while it can."""
        for model in self.models.values():
            if model.batcher.lost:
                return f"model '{model.name}': the GPU is lost to this process"
        return None

    def why_not_ready(self, model: Served | None = None) -> str | None:
        """Return why one model, or the server, is not ready; None if it is."""
        if self.leaving:
            return "the server is shutting down"
        return self.own_problem(model) or self.elsewhere

    def own_problem(self, model: Served | None = None) -> str | None:
        """Return why one model, or any of them, cannot answer in this process."""
        chosen = [model] if model else self.served.values()
        reasons = (each.why_not_ready() for each in chosen)
        return self.fatal or next((reason for reason in reasons if reason), None)

    def drain(self) -> None:
        """Accept no more requests and report not ready; accepted ones are still answered."""
        self.leaving = self.draining = True
        for each in self.served.values():
            each.draining = True

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """End the engines' threads; `drain`: once they have answered."""
        self.drain()
        for pipeline in self.pipelines.values():
            pipeline.close()
        left_s = countdown(timeout_s)
        for model in self.models.values():
            model.batcher.close(drain=drain, timeout_s=left_s())
        self.sampler.close()
        if self.memory is not None:
            self.memory.close()

    def metadata(self) -> dict[str, Any]:
        offered = list(EXTENSIONS)
        if self.memory is not None:
            offered.append("system_shared_memory")
        return {"name": "deploykit", "version": __version__, "extensions": offered}

    def statistics(self) -> dict[str, Any]:
        models = [each.metrics.statistics() for each in self.models.values()]
        return {"model_stats": [*models, *(each.statistics() for each in self.pipelines.values())]}

    def index(self) -> list[dict[str, str]]:
        """Return the repository index: every model and pipeline, and whether it is ready."""
        reasons = {name: self.why_not_ready(each) for name, each in self.served.items()}
        return [
            {
                "name": name,
                "version": VERSION,
                "state": "UNAVAILABLE" if reason else "READY",
                "reason": reason or "",
            }
            for name, reason in reasons.items()
        ]

    def add_metrics(self, samples: Callable[[], Iterable[Sample]]) -> None:
        """Add the samples that `samples` returns to /metrics."""
        self._samples.append(samples)

    def samples(self) -> list[Sample]:
        collect = [*(each.samples for each in self.served.values()), *self._samples]
        return [sample for each in collect for sample in each()]
