"""Makes each file of the small zoo through the public API, once for all who share a folder."""

from __future__ import annotations

import fcntl
import importlib.util
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.core.errors import DeploykitError
from deploykit.evaluation.artefacts import Made
from tests.support.campaign import CAMPAIGN
from tests.support.zoo.members import ZOO, Files, prepare

IN_A_CAMPAIGN = ("resnet18", "encoder")  # which takes longest; encoder-masked has its layers
SMALL = tuple(
    name
    for name, member in ZOO.items()
    if not member.large and (CAMPAIGN or name not in IN_A_CAMPAIGN)
)
MAX_DROP = 0.01
SAMPLES = 32  # to calibrate with, and the largest batch of an export's parity
# .safetensors is what the zoo is for; without that package a plain state dict will do
KIND = "safetensors" if importlib.util.find_spec("safetensors") else "pt"


@dataclass
class Keeper:
    """What was made so far, in `folder`. A refusal is kept like a file, and raised again.

    Processes may share the folder: each thing is made by the first that asks for it.
    """

    folder: Path
    done: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def files(self, name: str) -> Files:
        """The member's weights and data; skips the test where a package that it needs is absent."""
        member = ZOO[name]
        if member.missing:
            pytest.skip(f"{name}: {member.missing}")
        found: Files = self._once(
            name, make=lambda: prepare(member, self.folder, samples=SAMPLES, kind=KIND)
        )
        return found

    def exported(self, name: str) -> Made:
        files, out = self.files(name), self.folder / f"{name}.onnx"
        given = {"arch": files.arch, "inputs": list(files.inputs)}
        found: Made = self._once(
            name, "fp32", make=lambda: dk.export(files.model, out=out, **given)
        )
        return found

    def quantized(self, name: str, to: str) -> Made:
        """`name` in precision `to`; "fp32" is the exported file itself."""
        source, files = self.exported(name), self.files(name)
        given = {"data": files.data, "max_drop": MAX_DROP if files.data else None}
        out = self.folder / f"{name}.{to}.onnx"
        found: Made = self._once(
            name, to, make=lambda: dk.quantize(source.path, to, out, calib=files.calib, **given)
        )
        return found

    def _once(self, *key: str, make: Callable[[], Files | Made]) -> Any:
        if key not in self.done:
            kept = self.folder / f"{'.'.join(key)}.pickle"
            with (self.folder / f"{key[0]}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not kept.exists():
                    try:
                        result: Files | Made | DeploykitError = make()
                    except DeploykitError as exc:
                        result = exc
                    kept.write_bytes(pickle.dumps(result))
            self.done[key] = pickle.loads(kept.read_bytes())
        if isinstance(self.done[key], DeploykitError):
            raise self.done[key]
        return self.done[key]
