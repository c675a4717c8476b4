"""Pipelines: open one with its models, run it on files, and describe it to the server."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.artefacts import Progress, no_progress
from deploykit.api.open import open_proven
from deploykit.api.outputs import ANSWERS, claim
from deploykit.core.errors import BadInput, DeploykitError, NotFound
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.json_value import Record
from deploykit.core.paths import StrPath

if TYPE_CHECKING:
    from deploykit.pipelines.connect import StageGraph
    from deploykit.pipelines.models import Ports
    from deploykit.pipelines.run import OpenPipeline
    from deploykit.pipelines.stages import Definition
    from deploykit.runtimes.engine import Engine
    from deploykit.serving.models.pipelines import MakePipeline

log = logging.getLogger(__name__)


def pipeline(
    path: StrPath,
    *,
    device: str = "auto",
    batch: int = 32,
    threads: int | None = None,
    trust: bool = False,
    on_note: Callable[[str], None] = log.warning,
) -> OpenPipeline:
    """Open a pipeline, a .py or .toml file, with its models; call it with a request's input.

    Reading the file runs its code. `batch`: most rows of a model's call. Raises BadInput for a
    pipeline that cannot run, NotFound, and as `load` does for its models.
    """
    from deploykit.pipelines.file import read_pipeline
    from deploykit.pipelines.run import OpenPipeline
    from deploykit.runtimes.batching import prove_rows

    if batch < 1:
        raise BadInput(f"`batch` must be 1 or more, got {batch}")
    definition = read_pipeline(Path(path))
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, file in files_of_models(definition).items():
            (engines[name],) = open_proven(
                file, device, threads=threads, trust=trust, on_note=on_note
            )
            stack.callback(engines[name].close)
        graph = connect_engines(definition, engines)
        rows = {}
        for name, engine in engines.items():
            most = min(batch, engine.max_batch or batch)
            proof = engine.batching or prove_rows(engine, most, samples=engine.examples)
            rows[name] = most if proof.passed else 0
        stack.pop_all()
    return OpenPipeline(graph, engines, rows)


def files_of_models(definition: Definition) -> dict[str, Path]:
    """The file of each model. Raises NotFound or BadInput naming the model."""
    for name, file in definition.models.items():
        try:
            check_readable(file)
        except DeploykitError as exc:
            raise type(exc)(
                f"{definition.path.name}: model '{name}': {exc.message}", hint=exc.hint
            ) from exc
    return definition.models


def connect_engines(definition: Definition, engines: Mapping[str, Engine]) -> StageGraph:
    """Check the pipeline with the inputs and outputs of its models, by stage."""
    from deploykit.pipelines.connect import connect_stages

    return connect_stages(definition, {name: _ports(engine) for name, engine in engines.items()})


def _ports(engine: Engine) -> Ports:
    from deploykit.pipelines.models import Ports
    from deploykit.runtimes.tasks.engine import TaskSteps

    file, steps = engine.source, None
    if file is not None and file.manifest is not None and file.manifest.task is not None:
        steps = TaskSteps(file.manifest.task, engine.inputs, engine.outputs, file.path.parent)
    return Ports(engine.inputs, engine.outputs, steps)


class ServedPipelines:
    """The pipelines of a server by name, and in `files` the models of all, with those of `models`.

    A model of a pipeline is served as PIPELINE.STAGE, unless its file is served already. Raises
    BadInput for a name that is taken, and for a pipeline's file that cannot be read.
    """

    def __init__(self, pipelines: Mapping[str, Path], models: Mapping[str, Path]) -> None:
        from deploykit.pipelines.file import read_pipeline

        self.files = dict(models)
        self._stages: dict[str, dict[str, str]] = {}
        self._definitions = {name: read_pipeline(path) for name, path in pipelines.items()}
        for name, definition in self._definitions.items():
            served = {file.resolve(): model for model, file in self.files.items()}
            self._stages[name] = {
                stage: served.get(file.resolve(), f"{name}.{stage}")
                for stage, file in files_of_models(definition).items()
            }
            for stage, model in self._stages[name].items():
                self.files.setdefault(model, definition.models[stage])
        for name in pipelines:
            if name in self.files:
                raise BadInput(
                    f"the name '{name}' is that of a model and of a pipeline",
                    hint="give the pipeline another: NAME=FILE",
                )

    def live(self, models: Mapping[str, Sequence[Engine]]) -> dict[str, MakePipeline]:
        """Check the pipelines; `models`: the opened ones of `files`."""
        from deploykit.pipelines.live import LivePipeline

        found: dict[str, MakePipeline] = {}
        for name, definition in self._definitions.items():
            stages = self._stages[name]
            engines = {stage: models[model][0] for stage, model in stages.items()}
            found[name] = partial(LivePipeline, name, connect_engines(definition, engines), stages)
        return found


@dataclass(frozen=True)
class AnsweredFiles(Record):
    """What a pipeline answered to files: `answers` by file, or in `path`, one JSON line each."""

    pipeline: str
    files: int
    seconds: float
    device: str
    path: Path | None
    answers: Mapping[str, Any]


def predict_files(
    path: StrPath,
    data: StrPath,
    out: StrPath | None = None,
    *,
    device: str = "auto",
    batch: int = 32,
    trust: bool = False,
    force: bool = False,
    on_progress: Progress = no_progress,
    on_note: Callable[[str], None] = log.warning,
) -> AnsweredFiles:
    """Run a pipeline on a file, or on each file of a folder: into JSON Lines, with `out`.

    `batch`: files at a time, whose rows a model runs together. Raises as `pipeline` does, and
    BadInput naming the file and the stage that could not answer; then nothing is written.
    """
    files, out = _files(Path(data)), None if out is None else Path(out)
    if out is None and len(files) > 1:
        raise BadInput(f"{data}: is a folder; where do the answers go?", hint="`out` FILE.jsonl")
    if out is not None:
        out = claim(out, ANSWERS, (path, data), force=force)
    with ExitStack() as stack:
        opened = stack.enter_context(
            pipeline(path, device=device, batch=batch, trust=trust, on_note=on_note)
        )
        target = None
        if out is not None:
            target = stack.enter_context(stack.enter_context(atomic_write(out)).open("w"))
        answers, started_s = dict[str, Any](), time.perf_counter()
        for at in range(0, len(files), batch):
            several = files[at : at + batch]
            for file, answer in zip(several, _answers(opened, several), strict=True):
                if target is None:
                    answers[file.name] = answer
                else:
                    target.write(json.dumps({"file": file.name, "answer": answer}) + "\n")
            done = at + len(several)
            on_progress(f"{done}/{len(files)} files", done / len(files))
        seconds = time.perf_counter() - started_s
    devices = " and ".join(sorted({each.device for each in opened.engines.values()}))
    return AnsweredFiles(Path(path).name, len(files), seconds, devices or "cpu", out, answers)


def _files(data: Path) -> list[Path]:
    """A file, or those of a folder in the order of their names."""
    if not data.is_dir():
        return [check_readable(data)]
    files = sorted(each for each in data.iterdir() if each.is_file() and each.name[0] != ".")
    if not files:
        raise NotFound(f"{data}: holds no file")
    return files


def _answers(opened: OpenPipeline, files: Sequence[Path]) -> list[Any]:
    """The answers as JSON values. Raises BadInput naming the file."""
    from deploykit.pipelines.failures import failure_reason

    graph, inputs = opened.graph, list[Any]()
    for file in files:
        try:
            inputs.append(graph.read(file.read_bytes()))
        except BadInput as exc:
            raise BadInput(f"{file}: {exc.message}", hint=exc.hint) from exc
    try:
        found = opened.run(inputs)
        return [graph.answer_json(each) for each in found]
    except DeploykitError as exc:
        if len(files) > 1:  # which of them?
            for file in files:
                _answers(opened, [file])
        raise BadInput(f"{files[0]}: {failure_reason(exc)}", hint=exc.hint) from exc
