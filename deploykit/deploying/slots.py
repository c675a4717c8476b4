"""Keep a cache of engines on a device in two slots; `state.json` names the active one.

    DIR/state.json      `CacheState`, replaced as a whole
    DIR/timing.cache    TensorRT's measurements of kernels, for the next build
    DIR/a-DIGEST/       an engine with its manifest and golden samples
    DIR/a-DIGEST/slot.json   its key and the SHA-256 of each file, written last

A slot counts once its `slot.json` is on the disk. The next build removes what a kill or a power cut
left before that. Nothing depends on the time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.files import (
    check_inside,
    make_folder,
    read_json,
    sha256,
    write_errors,
    write_json,
)
from deploykit.core.json_value import Record, from_json
from deploykit.deploying.folder import sync

log = logging.getLogger(__name__)

MAX_TRIES = 3  # per key, if another engine can serve: a build may crash the machine
_DIGITS = 16  # hex digits of the digest in a folder's name
_ALIKE = ("name", "runtime", "architecture", "compute_capability", "gpu", "sm_count")


@dataclass(frozen=True)
class EngineKey(Record):
    """All that an engine depends on. A field is empty or 0 if absent, as the GPU on profile `cpu`.

    `model_sha256` covers the ONNX file with its weights, manifest and golden samples. `batch`:
    "smallest,usual,largest", then ";T=16,128,512" for other axes. `runtime` has the full version,
    "tensorrt 10.3.0".
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
        """Hash of all fields, part of the name of the slot's folder."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]

    def changes(self, other: EngineKey) -> str:
        """Describe the differences: "driver 535.1 -> 580.2, power_mode 15W -> 25W"; no hashes."""
        before, now = self.to_dict(), other.to_dict()
        return ", ".join(
            field if field == "model_sha256" else f"{field} {before[field]} -> {value}"
            for field, value in now.items()
            if before[field] != value
        )

    def may_replace(self, other: EngineKey) -> bool:
        """Return whether an engine of this key is a valid substitute for one of `other`."""
        return all(getattr(self, field) == getattr(other, field) for field in _ALIKE)


@dataclass(frozen=True)
class CacheState(Record):
    """The state of a cache between boots.

    `name`: the model's name; `active`: the slot that serves. `key`: the digest that was tried
    `tries` times without becoming ready; `why`: why it is not tried again, if known.
    """

    name: str = ""
    active: str = ""
    key: str = ""
    tries: int = 0
    why: str = ""

    def begin(self, name: str, digest: str) -> CacheState:
        """Count a try before a build of `digest`."""
        tries = self.tries if self.key == digest else 0
        return replace(self, name=name, key=digest, tries=tries + 1, why="")

    def fail(self, digest: str, why: str) -> CacheState:
        """Never try `digest` again: its build failed, or it was rolled back."""
        return replace(self, key=digest, tries=MAX_TRIES, why=why)

    def interrupt(self) -> CacheState:
        """Take back the try, as the operator stopped the build."""
        return replace(self, tries=max(0, self.tries - 1))

    def confirm(self) -> CacheState:
        """Clear the tries, as the active engine is ready."""
        return replace(self, key="", tries=0, why="")


@dataclass(frozen=True)
class Booted(Record):
    """Which engine serves. `source`: "cache", "build", or "previous" where a build failed.

    `slot`: the one to start from or to build into. `why`: a line for the log.
    """

    source: Literal["cache", "build", "previous"]
    slot: str
    why: str


def decide(state: CacheState, key: EngineKey, slots: Mapping[str, EngineKey]) -> Booted:
    """Return the engine to serve next for `key`, which may have to be built.

    `slots`: the folders that hold a complete engine, with their keys. If a slot proves damaged,
    call it again without that slot.
    """
    order = sorted(slots, key=lambda slot: slot != state.active)
    same = [slot for slot in order if slots[slot] == key]
    others = [slot for slot in order if slots[slot] != key and slots[slot].may_replace(key)]
    given_up = state.key == key.digest and state.tries >= MAX_TRIES
    if given_up and others:
        why = state.why or f"its build was begun {state.tries} times and did not come to an end"
        return Booted("previous", others[0], why)
    if same:
        return Booted("cache", same[0], "nothing changed")
    kept = others[0] if others else state.active
    slot = f"{'b' if kept.startswith('a-') else 'a'}-{key.digest}"
    before = next((slots[slot] for slot in order), None)
    return Booted("build", slot, before.changes(key) if before else "the cache has no engine")


CACHE_VERSION = 1
STATE_FILE, SLOT_FILE = "state.json", "slot.json"
TIMING_FILE = "timing.cache"
_SLOT = re.compile(r"[ab]-[0-9a-f]{16}")
_T = TypeVar("_T")


@dataclass(frozen=True)
class SlotRecord(Record):
    """The content of `slot.json`: the engine's file, its key, and each file's SHA-256 by name."""

    engine: str
    key: EngineKey
    files: Mapping[str, str]


class EngineCache:
    """The folder of a cache; read and write it only inside `lock`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def lock(self) -> Iterator[int]:
        """Lock the cache, once no other process has it; yield a descriptor to inherit."""
        with write_errors(self.folder):
            if not self.folder.is_dir():
                make_folder(self.folder)
            handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with write_errors(self.folder):
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    log.warning("%s: another process uses the cache; waiting for it", self.folder)
                    fcntl.flock(handle, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):
                for path in self.folder.glob(f".{STATE_FILE}.*"):  # left by a killed process
                    path.unlink()
            yield handle
        finally:
            os.close(handle)

    def state(self) -> CacheState:
        """Read `state.json`; return an empty state if it is missing or damaged."""
        path = self.folder / STATE_FILE
        with contextlib.suppress(DeploykitError):
            return _read(CacheState, path)
        return CacheState()

    def save(self, state: CacheState) -> None:
        """Replace `state.json`, which switches from one slot to the other."""
        with write_errors(self.folder):
            write_json(self.folder / STATE_FILE, {"cache": CACHE_VERSION, **state.to_dict()})
            sync(self.folder)

    def slots(self) -> dict[str, EngineKey]:
        """Return the folders of complete engines with their keys; files are not checked yet."""
        found = {}
        with write_errors(self.folder):
            names = sorted(path.name for path in self.folder.iterdir())
        for name in filter(_SLOT.fullmatch, names):
            with contextlib.suppress(DeploykitError):
                found[name] = _read(SlotRecord, self.folder / name / SLOT_FILE).key
        return found

    def check(self, slot: str) -> Path:
        """Return the engine of a slot. Raises BadInput if a file differs from what was built."""
        folder = self.folder / slot
        record = _read(SlotRecord, folder / SLOT_FILE)
        if record.engine not in record.files:
            raise BadInput(f"{folder / SLOT_FILE}: names no engine")
        for name, digest in record.files.items():
            check_inside(folder, name, str(folder))
            if sha256(folder / name) != digest:
                raise BadInput(f"{folder / name}: was changed or damaged (SHA-256 differs)")
        return folder / record.engine

    def empty(self, slot: str) -> None:
        with write_errors(self.folder):
            for path in list(self.folder.iterdir()):
                if path.name.startswith(f"{slot[0]}-"):
                    shutil.rmtree(path)
            (self.folder / slot).mkdir()

    def drop(self, slot: str) -> None:
        shutil.rmtree(self.folder / slot, ignore_errors=True)

    def seal(self, slot: str, engine: str, key: EngineKey) -> None:
        """Record a proven engine as complete, once all its files are on the disk."""
        folder = self.folder / slot
        with write_errors(self.folder):
            files = sorted(path for path in folder.iterdir() if path.is_file())
            for path in files:
                sync(path)
            sync(folder)
            record = SlotRecord(engine, key, {path.name: sha256(path) for path in files})
            write_json(folder / SLOT_FILE, {"cache": CACHE_VERSION, **record.to_dict()})
            sync(folder)
            sync(self.folder)


def _read(kind: type[_T], path: Path) -> _T:
    """Read a JSON document of the cache. Raises BadInput, NotFound."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("cache") != CACHE_VERSION:
        raise BadInput(f"{path}: does not have version {CACHE_VERSION}")
    found: _T = from_json(kind, values, str(path))
    return found
