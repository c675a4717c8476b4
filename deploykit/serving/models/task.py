"""The task of a served model, from its manifest, and the steps that run it."""

from __future__ import annotations

import logging
from typing import Any

from deploykit.core.errors import DeploykitError, MissingExtra, Unsupported
from deploykit.core.task import Task
from deploykit.engines.engine import Engine
from deploykit.engines.tasks.engine import TaskSteps

log = logging.getLogger(__name__)


class ModelTask:
    """The task that a file's manifest declares; empty without a manifest.

    Raises BadInput for a task that does not fit the model. If a package for the task is missing,
    the model is served all the same, for clients that send tensors.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        manifest = engine.source.manifest if engine.source else None
        self.task: Task | None = manifest.task if manifest else None
        self.note = ""
        self.ready = False  # whether the model takes images or sentences
        self._steps: TaskSteps | None = None
        self._why: DeploykitError = Unsupported(
            f"model '{name}' has no task, so it takes only tensors: POST /v2/models/{name}/infer",
            hint="export it with `task`, so that it takes images or sentences",
        )
        if self.task is None or engine.source is None:
            return
        try:
            folder = engine.source.path.parent
            self._steps = TaskSteps(self.task, engine.inputs, engine.outputs, folder)
            self.ready = True
        except MissingExtra as exc:
            self._why = exc
            self.note = f"takes only tensors: {exc.message}; {exc.hint}"
            log.warning("model '%s': %s", name, self.note)

    @property
    def steps(self) -> TaskSteps:
        """Return the steps. Raises Unsupported or MissingExtra if there are none."""
        if self._steps is None:
            raise self._why
        return self._steps

    @property
    def parameters(self) -> dict[str, str]:
        """Return the task as strings, for the model's metadata."""
        if self.task is None or self._steps is None:
            return {}
        return {"task": self.task.kind, "takes": "text" if self.task.image is None else "image"}

    @property
    def facts(self) -> dict[str, Any] | None:
        """Return the parameters with the number of labels, for the dashboard."""
        found = self.parameters
        return {**found, "labels": len(self.task.labels)} if found and self.task else None
