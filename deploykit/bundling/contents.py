"""What every kind of bundle is made of: a model, its target and its name when it is served."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.files import check_inside, sha256
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.core.profile import Profile
from deploykit.core.task import TOKENIZER
from deploykit.runtimes.onnxruntime.file import external_files

# also part of the names of files, of a systemd unit and of an image
SERVED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")
_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Contents:
    """`model`: a typed ONNX file with its manifest and golden samples. `name`: as it is served.

    `batch`: the smallest, usual and largest. `wheels`: bring what `pip` installs on the target.
    `timing_cache`: TensorRT's, of the same kind of device. `release`: of the target's host,
    "jetpack-6.2" or "cuda-13"; None for the profile's usual one. `axes`: sizes of other dynamic
    axes, "T=16,128,512".
    """

    model: Artefact
    profile: Profile
    name: str
    batch: tuple[int, int, int]
    wheels: bool = False
    timing_cache: Path | None = None
    release: str | None = None
    axes: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """The model's. Raises BadInput without one."""
        if self.model.manifest is None:
            raise BadInput(f"{self.model}: has no manifest next to it")
        return self.model.manifest

    @property
    def extras(self) -> tuple[str, ...]:
        """What else has to be installed where the model is served."""
        task = self.manifest.task
        return () if task is None else (task.extra,)

    def copy_model(self, out: Path) -> None:
        """Copy the model to `out`, with its weights, manifest and golden samples named after it.

        Raises BadInput for what is not what the manifest says.
        """
        evidence = self.manifest.evidence
        named: dict[str, Any] = {"weights": ".data", "golden": ".golden.npz"}
        known = {evidence.weights.file} if evidence.weights else set()
        if others := set(external_files(self.model.path)) - known:
            raise BadInput(
                f"{self.model}: has weights in {min(others)}, which its manifest does not name",
                hint="without its manifest `bundle` copies all of them",
            )
        shutil.copyfile(self.model.path, out)
        moved = {}
        for key, suffix in named.items():
            found = getattr(evidence, key)
            if found is not None:
                copy_checked(self.model.path, found.file, found.sha256, Path(f"{out}{suffix}"))
                moved[key] = replace(found, file=f"{out.name}{suffix}")
        if evidence.weights is not None and evidence.weights.file != f"{out.name}.data":
            from deploykit.onnx_graph.storage import point_to

            point_to(out, f"{out.name}.data")
        copied = replace(self.manifest, sha256=sha256(out), evidence=replace(evidence, **moved))
        task = self.manifest.task
        if task is not None and (text := task.text) is not None:
            copy_checked(self.model.path, text.tokenizer, text.sha256, Path(f"{out}{TOKENIZER}"))
        write_manifest(out, replace(copied, task=task and task.named_after(out.name)))


def copy_checked(model: Path, name: str, digest: str, out: Path) -> None:
    check_inside(model.parent, name, str(model))
    source = model.with_name(name)
    shutil.copyfile(source, out)
    if sha256(out) != digest:
        raise BadInput(f"{source}: is not the file that the manifest of {model.name} describes")


def fill_templates(kind: str, folder: Path, known: Mapping[str, str]) -> None:
    """Write the files of `templates/KIND` into `folder`, with a value in place of each @KEY@.

    `@?KEY ` keeps the rest of its line if the value is not empty. A program's name ends in ".in".
    """
    for template in sorted((_TEMPLATES / kind).iterdir()):
        lines = []
        for line in template.read_text(encoding="utf-8").splitlines():
            condition = re.match(r"@\?([A-Z_]+) ?", line)
            if condition is None or known[condition[1]]:
                lines.append(line[condition.end() :] if condition else line)
        name = _fill(template.name.removesuffix(".in"), known)
        (folder / name).write_text(_fill("\n".join(lines), known) + "\n", encoding="utf-8")


def _fill(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"@([A-Z0-9_]+)@", lambda match: known[match[1]], text)
