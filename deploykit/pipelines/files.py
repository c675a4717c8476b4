"""The files that a pipeline answers, and those of its models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from deploykit.core.errors import BadInput, DeploykitError, NotFound
from deploykit.core.files import check_readable
from deploykit.core.json_value import Record
from deploykit.core.paths import StrPath
from deploykit.pipelines.failures import failure_reason
from deploykit.pipelines.run import OpenPipeline
from deploykit.pipelines.stages import Definition


@dataclass(frozen=True)
class AnsweredFiles(Record):
    """What a pipeline answered: `answers` by file, or in `path`, one JSON line each."""

    pipeline: str
    files: int
    seconds: float
    device: str
    path: Path | None
    answers: Mapping[str, Any]


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


def name_models_of(
    definitions: Mapping[str, Definition], models: Mapping[str, Path]
) -> tuple[dict[str, Path], dict[str, dict[str, str]]]:
    """The files to serve by name, with those of `models`; by pipeline, the name for each stage.

    A model is served as PIPELINE.STAGE, unless its file is served already. Raises BadInput for the
    name of a pipeline that is taken.
    """
    files, stages = dict(models), dict[str, dict[str, str]]()
    for name, definition in definitions.items():
        served = {file.resolve(): model for model, file in files.items()}
        stages[name] = {
            stage: served.get(file.resolve(), f"{name}.{stage}")
            for stage, file in files_of_models(definition).items()
        }
        for stage, model in stages[name].items():
            files.setdefault(model, definition.models[stage])
    for name in definitions:
        if name in files:
            raise BadInput(
                f"the name '{name}' is that of a model and of a pipeline",
                hint="give the pipeline another: NAME=FILE",
            )
    return files, stages


def input_files(data: Sequence[StrPath]) -> list[Path]:
    """Files, and those of folders in the order of their names. Raises NotFound, BadInput."""
    found: list[Path] = []
    for each in map(Path, data):
        inside = sorted(each.iterdir()) if each.is_dir() else [check_readable(each)]
        found += [file for file in inside if file.is_file() and file.name[0] != "."]
    if not found:
        names = ", ".join(map(str, data))
        raise NotFound(f"{names}: holds no file" if names else "there is no file to answer")
    return found


def answer_files(
    opened: OpenPipeline,
    files: Sequence[Path],
    batch: int,
    target: TextIO | None,
    on_progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """The answers by file; with `target`, written there as JSON Lines instead."""
    answers: dict[str, Any] = {}
    for at in range(0, len(files), batch):
        several = files[at : at + batch]
        for file, answer in zip(several, _answers(opened, several), strict=True):
            if target is None:
                answers[str(file)] = answer
            else:
                target.write(json.dumps({"file": str(file), "answer": answer}) + "\n")
        done = at + len(several)
        on_progress(f"{done}/{len(files)} files", done / len(files))
    return answers


def read_answers(path: Path) -> list[tuple[Path, Any]]:
    """The files and answers in the lines that `answer_files` wrote. Raises NotFound, BadInput."""
    found = []
    lines = check_readable(path).read_text("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            found.append((Path(one["file"]), one["answer"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BadInput(
                f"{path}: line {number} holds no file with its answer",
                hint="deploykit predict PIPELINE.py FILES -o answers.jsonl writes such lines",
            ) from None
    return found


def _answers(opened: OpenPipeline, files: Sequence[Path]) -> list[Any]:
    """The answers as JSON values. Raises BadInput naming the file."""
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
