"""Pipelines: open one with its models, run it on files, and describe it to the server."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path

from deploykit.core.errors import BadInput
from deploykit.core.files import StrPath, atomic_write
from deploykit.engines.batching import prove_rows
from deploykit.engines.engine import Engine
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.evaluation.outputs import ANSWERS, claim
from deploykit.evaluation.verify import open_proven
from deploykit.pipelines.connect import connect_engines
from deploykit.pipelines.file import (
    AnsweredFiles,
    answer_files,
    files_of_models,
    input_files,
    name_models_of,
    read_pipeline,
)
from deploykit.pipelines.live import Host, LivePipeline
from deploykit.pipelines.run import OpenPipeline

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


class ServedPipelines:
    """The pipelines of a server by name, and in `files` the models of all, with those of `models`.

    A model of a pipeline is served as PIPELINE.STAGE, unless its file is served already. Raises
    BadInput for a name that is taken, and for a pipeline's file that cannot be read.
    """

    def __init__(self, pipelines: Mapping[str, Path], models: Mapping[str, Path]) -> None:

        self._definitions = {name: read_pipeline(path) for name, path in pipelines.items()}
        self.files, self._stages = name_models_of(self._definitions, models)

    def live(
        self, models: Mapping[str, Sequence[Engine]]
    ) -> dict[str, Callable[[Host], LivePipeline]]:
        """Check the pipelines; `models`: the opened ones of `files`."""

        found: dict[str, Callable[[Host], LivePipeline]] = {}
        for name, definition in self._definitions.items():
            stages = self._stages[name]
            engines = {stage: models[model][0] for stage, model in stages.items()}
            found[name] = partial(LivePipeline, name, connect_engines(definition, engines), stages)
        return found


def models_to_serve(
    pipelines: Mapping[str, Path], models: Mapping[str, Path], _on_progress: object = None
) -> dict[str, Path]:
    """The `files` of `ServedPipelines`."""
    return ServedPipelines(pipelines, models).files


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
    """Run a pipeline on files, or on those of folders; with `out`, into JSON Lines.

    `batch`: files at a time, whose rows a model runs together. Raises as `pipeline` does, and
    BadInput naming the file and the stage that could not answer; then nothing is written.
    """

    files, out = input_files(data), None if out is None else Path(out)
    if out is not None:
        out = claim(out, ANSWERS, (path, *data), force=force)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # what stages print
        opened = stack.enter_context(
            pipeline(path, device=device, batch=batch, trust=trust, on_note=on_note)
        )
        target = None
        if out is not None:
            target = stack.enter_context(stack.enter_context(atomic_write(out)).open("w"))
        started_s = time.perf_counter()
        answers = answer_files(opened, files, batch, target, on_progress)
        seconds = time.perf_counter() - started_s
    return AnsweredFiles(Path(path).name, len(files), seconds, opened.device, out, answers)
