"""Makes each file of the small zoo once in a test session, through the public API."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import deploykit as dk
from deploykit.api.artefacts import Made
from deploykit.core.errors import DeploykitError
from tests.support.campaign import CAMPAIGN
from tests.support.zoo.members import ZOO, Files, prepare

SMALL = tuple(
    name
    for name, member in ZOO.items()
    if not member.large and (CAMPAIGN or name != "resnet18")  # which takes longest
)
MAX_DROP = 0.01
SAMPLES = 32  # to calibrate with, and the largest batch of an export's parity
# .safetensors is what the zoo is for; without that package a plain state dict will do
KIND = "safetensors" if importlib.util.find_spec("safetensors") else "pt"


@dataclass
class Keeper:
    """What was made so far, in `folder`. A refusal is kept like a file, and raised again."""

    folder: Path
    done: dict[tuple[str, ...], Files | Made | DeploykitError] = field(default_factory=dict)

    def files(self, name: str) -> Files:
        """The member's weights and data; skips the test where a package that it needs is absent."""
        member = ZOO[name]
        if member.missing:
            pytest.skip(f"{name}: {member.missing}")
        found = self.done.get((name,))
        if not isinstance(found, Files):
            found = self.done[name,] = prepare(member, self.folder, samples=SAMPLES, kind=KIND)
        return found

    def exported(self, name: str) -> Made:
        files = self.files(name)
        found = self.done.get((name, "fp32"))
        if found is None:
            try:
                found = dk.export(
                    files.model,
                    out=self.folder / f"{name}.onnx",
                    arch=files.arch,
                    inputs=list(files.inputs),
                )
            except DeploykitError as exc:
                found = exc
            self.done[name, "fp32"] = found
        return _given(found)

    def quantized(self, name: str, to: str) -> Made:
        """`name` in precision `to`; "fp32" is the exported file itself."""
        source = self.exported(name)
        found = self.done.get((name, to))
        if found is None:
            files = self.files(name)
            try:
                found = dk.quantize(
                    source.path,
                    to,
                    self.folder / f"{name}.{to}.onnx",
                    calib=files.calib,
                    data=files.data,
                    max_drop=MAX_DROP if files.data else None,
                )
            except DeploykitError as exc:
                found = exc
            self.done[name, to] = found
        return _given(found)


def _given(found: object) -> Made:
    if isinstance(found, DeploykitError):
        raise found
    assert isinstance(found, Made)
    return found
