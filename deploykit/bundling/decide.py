"""Decide how a device starts: from a cached engine, after a build, or from the previous engine.

Pure: the cache's files are in slots.py. A cache has two slots, so that a build never touches the
engine that serves. A key that was tried `MAX_TRIES` times without success is not tried again while
another engine can serve: a build that takes the machine down would otherwise never end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from deploykit.core.json_value import Record

MAX_TRIES = 3
_DIGITS = 16  # of the digest in a folder's name
_ALIKE = ("name", "runtime", "architecture", "compute_capability", "gpu", "sm_count")


@dataclass(frozen=True)
class EngineKey(Record):
    """All that an engine depends on. Empty or 0: not there, as a GPU on profile `cpu`.

    `model_sha256`: of the ONNX file with its weights, manifest and golden samples. `batch`:
    "smallest,usual,largest", then ";T=16,128,512" for other axes. `runtime`: with its full
    version, "tensorrt 10.3.0".
    """

    name: str
    model_sha256: str
    profile: str
    batch: str
    runtime: str
    architecture: str
    compute_capability: str = ""
    gpu: str = ""
    sm_count: int = 0
    driver: str = ""
    l4t: str = ""
    power_mode: str = ""
    deploykit: str = ""

    @property
    def digest(self) -> str:
        """Of all fields; part of the name of the slot's folder."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]

    def changes(self, other: EngineKey) -> str:
        """What differs: "driver 535.1 -> 580.2, power_mode 15W -> 25W"; hashes by name alone."""
        before, now = self.to_dict(), other.to_dict()
        return ", ".join(
            field if field == "model_sha256" else f"{field} {before[field]} -> {value}"
            for field, value in now.items()
            if before[field] != value
        )

    def may_replace(self, other: EngineKey) -> bool:
        """Whether an engine of this key can run, and be meant, where `other` is wanted."""
        return all(getattr(self, field) == getattr(other, field) for field in _ALIKE)


@dataclass(frozen=True)
class CacheState(Record):
    """What a cache remembers between boots.

    `name`: of the model; `active`: the slot that serves. `key`: the digest that was tried `tries`
    times without becoming ready; `why`: why it is not tried again, if that is known.
    """

    name: str = ""
    active: str = ""
    key: str = ""
    tries: int = 0
    why: str = ""

    def given_up(self, digest: str) -> bool:
        return self.key == digest and self.tries >= MAX_TRIES

    def begin(self, name: str, digest: str) -> CacheState:
        """Before a build of `digest`."""
        tries = self.tries if self.key == digest else 0
        return replace(self, name=name, key=digest, tries=tries + 1, why="")

    def fail(self, digest: str, why: str) -> CacheState:
        """A build of `digest` failed, or its engine is not wanted: it is not tried again."""
        return replace(self, key=digest, tries=MAX_TRIES, why=why)

    def interrupt(self) -> CacheState:
        """The operator ended the build: not its fault."""
        return replace(self, tries=max(0, self.tries - 1))

    def switch(self, slot: str) -> CacheState:
        return replace(self, active=slot)

    def confirm(self) -> CacheState:
        """The active engine is ready."""
        return replace(self, key="", tries=0, why="")


@dataclass(frozen=True)
class Decision:
    """What to do next. `slot`: to start from, or to build into. `why`: one line for the log."""

    do: Literal["start", "build", "fall back"]
    slot: str
    why: str


def decide(state: CacheState, key: EngineKey, slots: Mapping[str, EngineKey]) -> Decision:
    """The next step towards serving the engine of `key`.

    `slots`: the folders that hold a complete engine, with their keys. A slot that proves damaged is
    left out of them, and the question asked again.
    """
    order = sorted(slots, key=lambda slot: slot != state.active)
    same = [slot for slot in order if slots[slot] == key]
    others = [slot for slot in order if slots[slot] != key and slots[slot].may_replace(key)]
    given_up = state.given_up(key.digest)
    if given_up and others:
        why = state.why or f"its build was begun {state.tries} times and did not come to an end"
        return Decision("fall back", others[0], why)
    if same:
        return Decision("start", same[0], "nothing changed")
    kept = others[0] if others else state.active
    slot = f"{'b' if kept.startswith('a-') else 'a'}-{key.digest}"
    before = next((slots[slot] for slot in order), None)
    return Decision("build", slot, before.changes(key) if before else "the cache has no engine")
