"""Open a pipeline with its models, run it on files, and hand it to a server."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.files import StrPath
from deploykit.core.json_value import Record, Shown
from deploykit.engines.batching import prove_rows
from deploykit.engines.engine import Closing, Engine
from deploykit.evaluation.artefacts import ANSWERS, Progress, claim, no_progress
from deploykit.evaluation.predict import answer_file
from deploykit.evaluation.verify import open_proven
from deploykit.pipelines.file import files_of_models, input_files, read_pipeline
from deploykit.pipelines.stages import (
    StageGraph,
    connect_engines,
    failure_reason,
    located,
)

log = logging.getLogger(__name__)


class OpenPipeline(Closing, Shown):
    """A checked graph and its models' engines, which it closes; for one thread at a time.

    `max_rows`: most rows of a model's call; 0 if rows must not be joined.
    """

    in_notebook = ("device", "engines")

    def __init__(
        self, graph: StageGraph, engines: Mapping[str, Engine], max_rows: Mapping[str, int]
    ) -> None:
        self.graph = graph
        self.engines = engines
        self._max_rows = max_rows

    @property
    def device(self) -> str:
        return " and ".join(sorted({each.device for each in self.engines.values()})) or "cpu"

    def __call__(self, value: Any) -> Any:
        """Answer one request. Raises StageFailed, and a stage's DeploykitError."""
        return self.run([value])[0]

    def run(
        self, inputs: Sequence[Any], on_stage: Callable[[str, float], None] | None = None
    ) -> list[Any]:
        """Answer requests, rows of a model together. `on_stage` gets the seconds of each stage."""
        values = [{self.graph.input: each} for each in inputs]
        for name, stage in self.graph.stages.items():
            began_s = time.perf_counter()
            if stage.ports is None:
                given = [stage.run(each) for each in values]
            else:
                prepared = stage.prepare(values, self._max_rows[name])
                with located(f"stage '{name}'"):
                    outputs = [self.engines[name](feeds) for feeds in prepared.feeds]
                given = prepared.collect(outputs)
            for each, value in zip(values, given, strict=True):
                each[name] = value
            if on_stage is not None:
                on_stage(name, time.perf_counter() - began_s)
        return [each[self.graph.answer] for each in values]

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


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

    Reading the file runs its code. `batch`: most rows of a model's call. Raises BadInput for an
    invalid pipeline, NotFound, and what `load` raises for its models.
    """
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


@dataclass(frozen=True)
class AnsweredFiles(Record):
    """A pipeline's answers: `answers` by file, or one JSON line each in `path`."""

    pipeline: str
    files: int
    seconds: float
    device: str
    path: Path | None
    answers: Mapping[str, Any]


def predict_files(
    path: StrPath,
    data: Sequence[StrPath],
    out: StrPath | None = None,
    *,
    device: str = "auto",
    batch: int = 32,
    trust: bool = False,
    force: bool = False,
    on_progress: Progress = no_progress,
    on_note: Callable[[str], None] = log.warning,
) -> AnsweredFiles:
    """Run a pipeline on files or folders of files; with `out`, write JSON Lines.

    `batch`: files at a time, whose rows a model runs together. Raises what `pipeline` raises, and
    BadInput naming the file and the failed stage; then nothing is written.
    """
    files, out = input_files(data), None if out is None else Path(out)
    if out is not None:
        out = claim(out, ANSWERS, (path, *data), force=force)
    answers: dict[str, Any] = {}
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # stages may print
        opened = stack.enter_context(
            pipeline(path, device=device, batch=batch, trust=trust, on_note=on_note)
        )
        write = stack.enter_context(answer_file(out)) if out else None
        started_s = time.perf_counter()
        for at in range(0, len(files), batch):
            several = files[at : at + batch]
            for file, answer in zip(several, _answer(opened, several), strict=True):
                if write is None:
                    answers[str(file)] = answer
                else:
                    write(str(file), answer)
            done = at + len(several)
            on_progress(f"{done}/{len(files)} files", done / len(files))
        seconds = time.perf_counter() - started_s
    return AnsweredFiles(Path(path).name, len(files), seconds, opened.device, out, answers)


def _answer(opened: OpenPipeline, files: Sequence[Path]) -> list[Any]:
    graph, inputs = opened.graph, list[Any]()
    for file in files:
        with located(str(file)):
            inputs.append(graph.read(file.read_bytes(), own_file=True))
    try:
        return [graph.answer_json(each) for each in opened.run(inputs)]
    except DeploykitError as exc:
        if len(files) > 1:  # find the file that fails
            for file in files:
                _answer(opened, [file])
        raise BadInput(f"{files[0]}: {failure_reason(exc)}", hint=exc.hint) from exc


class ServedPipelines:
    """The pipelines of a server by name. `files`: their models, and those of `models`.

    A model of a pipeline is served as PIPELINE.STAGE, unless its file is served already. Raises
    BadInput for a name that is taken, and for a pipeline's file that cannot be read.
    """

    def __init__(self, pipelines: Mapping[str, Path], models: Mapping[str, Path]) -> None:
        self._definitions = {name: read_pipeline(path) for name, path in pipelines.items()}
        self._stages: dict[str, dict[str, str]] = {}  # pipeline -> stage -> model
        self.files = dict(models)
        for name, definition in self._definitions.items():
            served = {file.resolve(): model for model, file in self.files.items()}
            self._stages[name] = stages = {}
            for stage, file in files_of_models(definition).items():
                stages[stage] = served.get(file.resolve(), f"{name}.{stage}")
                self.files.setdefault(stages[stage], file)
        for name in self._definitions:
            if name in self.files:
                hint = "give the pipeline another: NAME=FILE"
                raise BadInput(f"the name '{name}' is that of a model and of a pipeline", hint=hint)

    def graphs(
        self, models: Mapping[str, Sequence[Engine]]
    ) -> dict[str, tuple[StageGraph, Mapping[str, str]]]:
        """Check the pipelines with the opened `models`; also return the models' names by stage."""
        found: dict[str, tuple[StageGraph, Mapping[str, str]]] = {}
        for name, definition in self._definitions.items():
            stages = self._stages[name]
            engines = {stage: models[model][0] for stage, model in stages.items()}
            found[name] = connect_engines(definition, engines), stages
        return found


def models_to_serve(
    pipelines: Mapping[str, Path], models: Mapping[str, Path], _on_progress: object = None
) -> dict[str, Path]:
    """Return the `files` of `ServedPipelines`."""
    return ServedPipelines(pipelines, models).files
