"""Start a bundle on its device: check it, build and prove its engine if needed, and serve it.

The ports open once the engine is proven. Until then health checks fail, so their start period must
be longer than a build. A build runs in a separate process. If it fails or is killed, the previous
engine serves: a cache keeps engines in two slots, and `state.json` names the active one.

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
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from deploykit.building.builder import Shapes
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, DeploykitError, GateFailed
from deploykit.core.files import (
    StrPath,
    check_inside,
    make_folder,
    read_json,
    sha256,
    write_errors,
    write_json,
)
from deploykit.core.json_value import Record, from_json
from deploykit.core.machine import this_machine
from deploykit.core.profile import Profile, load_profile, with_gpu
from deploykit.core.runtime import RUNTIMES
from deploykit.core.subprocesses import run_apart
from deploykit.deploying import STARTED
from deploykit.deploying import device as machines
from deploykit.deploying.device import EngineKey
from deploykit.deploying.folder import Bundle, read_bundle, sync, verify
from deploykit.engines.engine import check_device
from deploykit.engines.tasks import TaskSteps
from deploykit.evaluation.artefacts import span
from deploykit.evaluation.verify import open_proven, prove_engine
from deploykit.serving.observe.metrics import Sample
from deploykit.serving.options import VERSION, ServeOptions
from deploykit.serving.serve import serve_until_stopped

if TYPE_CHECKING:
    from deploykit.serving.server import Server

log = logging.getLogger(__name__)

_QUIET_S = 10.0  # interval of progress lines during a build
MAX_TRIES = 3  # per key, if another engine can serve: a build may crash the machine


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
    """The engine that serves. `source`: "cache", "build", or "previous" where a build failed.

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


def boot_until_stopped(
    bundle: StrPath,
    cache: StrPath,
    options: ServeOptions = ServeOptions(),  # noqa: B008 - frozen
    *,
    rollback: bool = False,
    retry: bool = False,
    log_format: str = "text",
    on_ready: Callable[..., None] | None = None,
) -> int:
    """Serve a bundle until SIGTERM or Ctrl-C, from an engine that was built on this device.

    Args:
        bundle: the folder that `bundle` wrote.
        cache: the folder of its engines.
        options: how to serve; the bundle names the model.
        rollback: serve the previous engine from now on.
        retry: build an engine again that failed or was rolled back.
        log_format: text or json lines on stderr.
        on_ready: called once it answers: `on_ready(host, port, grpc_port, names, booted=Booted)`.

    Returns the number of accepted requests without an answer. Raises BadInput for a damaged bundle
    or cache, Unsupported on a machine that the bundle is not for, and GateFailed for an engine with
    wrong outputs if no earlier one can serve.
    """
    check_device(options.device)
    folder = Path(bundle)
    found = read_bundle(folder)
    if found.kind not in STARTED:
        raise BadInput(
            f"{folder}: is a bundle for {found.kind}, which does not start by itself",
            hint="deploykit bundle MODEL --to docker",
        )
    if Path(cache).resolve().is_relative_to(folder.resolve()):
        raise BadInput(f"`cache` {cache}: is inside the bundle, which may hold only its own files")
    profile = load_profile(found.profile)
    if profile.device == "cpu" and options.device == "auto":
        options = replace(options, device="cpu")
    engines = EngineCache(Path(cache))
    boot = Boot(folder, profile, engines, options.device, rollback=rollback, retry=retry)
    with ExitStack() as stack:

        def on_start(
            _server: Server | None, host: str, port: int, grpc_port: int | None, names: list[str]
        ) -> None:
            booted = boot.confirm()
            stack.close()  # release the cache for other processes
            if on_ready is not None:
                on_ready(host, port, grpc_port, names, booted=booted)

        def on_serve(server: Server) -> None:
            """Show in the model's notes and the metrics whether the previous engine serves."""
            (model,), booted = server.repository.models.values(), boot.booted
            labels = {"model": model.name, "version": VERSION}
            previous = booted.source == "previous"
            if previous:
                model.remark = lambda: f"the previous engine serves: {booted.why}"
            metric = Sample("deploykit_previous_engine", labels, previous)
            server.repository.add_metrics(lambda: [metric])

        return serve_until_stopped(
            replace(options, reload=False),
            find=lambda: {found.name: stack.enter_context(boot.prepare())},
            log_format=log_format,
            on_start=on_start,
            on_serve=on_serve,
        )


@dataclass
class Boot:
    """One start. `run` calls what builds or proves; `booted`: the engine that `prepare` chose."""

    folder: Path
    profile: Profile
    cache: EngineCache
    device: str = "cpu"
    rollback: bool = False
    retry: bool = False
    run: Callable[..., Any] = run_apart
    state: CacheState = CacheState()
    booted: Booted = Booted("build", "", "")

    @contextlib.contextmanager
    def prepare(self) -> Iterator[Path]:
        """Yield the file of the engine to serve; the cache is locked meanwhile."""
        bundle = verify(self.folder, whole=False)
        key = self._check(bundle)
        with self.cache.lock() as lock:
            yield self._choose(bundle, key, lock)

    def confirm(self) -> Booted:
        """Record that the engine that `prepare` chose became ready, and return which it is."""
        if self.state.key and self.booted.source != "previous":
            self._save(self.state.confirm())
        return self.booted

    def _check(self, bundle: Bundle) -> EngineKey:
        """Compare bundle and machine. Raises Unsupported, GateFailed, MissingExtra."""
        tensorrt = self.profile.runtime == "tensorrt"
        number = machines.gpu_number(self.device) if tensorrt else 0
        machine = with_gpu(this_machine(), number)
        for note in machines.check_machine(bundle, self.profile, machine):
            log.warning("%s", note)
        gpu = None
        if tensorrt:
            # in a child: the build would lack the memory of a CUDA context here, 100 MB and more
            gpu = self.run(f"cuda:{number}", machines.read_gpu, number, inherit=())
            machines.check_gpu(self.profile, machine, gpu)
        model = Artefact.open(self.folder / bundle.model)
        known = model.manifest
        if known is not None and known.evidence.wrong:
            raise GateFailed(f"{model}: did not pass its gate: {known.evidence.wrong}")
        if known is not None and known.task is not None:  # else the first image or text would fail
            TaskSteps(known.task, known.inputs, known.outputs, model.path.parent)
        return machines.engine_key(bundle, self.profile, machine, gpu)

    def _choose(self, bundle: Bundle, key: EngineKey, lock: int) -> Path:
        """Follow the steps that `decide` names, until one gives an engine."""
        self.state, slots = self.cache.state(), self.cache.slots()
        if self.state.name not in ("", key.name):
            raise BadInput(
                f"{self.cache.folder}: is the cache of '{self.state.name}', not of '{key.name}'",
                hint="give each model a `cache` of its own",
            )
        if self.retry:
            self.state = self.state.confirm()
        failure: DeploykitError | None = None
        if self.rollback:
            self.state = self.state.fail(key.digest, "rolled back")
            if decide(self.state, key, slots).source != "previous":
                raise BadInput(f"{self.cache.folder}: has no earlier engine to roll back to")
            self._save(self.state)
        while True:
            step = decide(self.state, key, slots)
            building = step.source == "build"
            if building and failure is not None:
                raise failure
            try:
                make = self._build if building else self._start
                engine = make(bundle, key, step, lock)
            except DeploykitError as exc:
                what = "the new engine" if building else f"the engine in {step.slot}"
                log.error("%s is not used: %s", what, exc.message)
                failure = exc if building else failure
                slots.pop(step.slot, None)
                continue
            self.booted, self.state = step, replace(self.state, active=step.slot)
            return engine

    def _start(self, _bundle: Bundle, key: EngineKey, step: Booted, lock: int) -> Path:
        """Check a cached engine; the previous one, of another key, must be proven first."""
        engine, before = self.cache.check(step.slot), self.state
        if step.source == "previous":
            text = "SERVING THE PREVIOUS ENGINE (%s): %s; boot --retry builds again"
            log.error(text, step.slot, step.why)
            with write_errors(self.cache.folder):
                self.run(str(engine), prove, engine, self.device, inherit=(lock,))
        else:
            log.info("starting from the cached engine in %s", step.slot)
            if before.key == key.digest:  # it has never become ready
                self.state = before.begin(key.name, key.digest)
        if (state := replace(self.state, active=step.slot)) != before:
            self._save(state)
        return engine

    def _build(self, bundle: Bundle, key: EngineKey, step: Booted, lock: int) -> Path:
        """Build, prove and store an engine; the active slot is not touched."""
        model = self.folder / bundle.model
        log.info("building the engine in %s: %s", step.slot, step.why)
        name = f"{key.name}.{RUNTIMES[self.profile.runtime].suffix.rpartition('.')[2]}"
        out = self.cache.folder / step.slot / name
        self.state = self.state.begin(key.name, key.digest)
        logged, logged_s = "", 0.0

        def on_progress(phase: str, share: float) -> None:
            nonlocal logged, logged_s
            now_s = time.monotonic()
            if phase != logged or now_s - logged_s >= _QUIET_S:
                logged, logged_s = phase, now_s
                log.info("build: %3.0f %%  %s", share * 100, phase)

        try:
            self.cache.save(self.state)
            self.cache.empty(step.slot)
            build = (build_and_prove, model, bundle.profile, key.batch, self.device, out)
            with write_errors(self.cache.folder):
                notes = self.run(str(model), *build, on_progress=on_progress, inherit=(lock,))
            self.cache.seal(step.slot, name, key)
            self.cache.save(replace(self.state, active=step.slot))
        except DeploykitError as exc:
            if not isinstance(exc, GateFailed):  # keep one that failed its gate for inspection
                self.cache.drop(step.slot)
            self.state = self.state.fail(key.digest, exc.message)
            self._save(self.state)
            raise
        except BaseException:  # Ctrl-C, SIGTERM
            self.cache.drop(step.slot)
            self._save(self.state.interrupt())
            raise
        for note in notes:
            log.info("%s", note)
        return out

    def _save(self, state: CacheState) -> None:
        """Save the state if possible: a read-only or full cache can still serve."""
        try:
            self.cache.save(state)
        except DeploykitError as exc:
            log.warning("the cache's state could not be saved: %s", exc.message)


# The functions below run in a separate process.


def build_and_prove(
    model: Path,
    profile: str,
    batch: str,
    device: str,
    out: Path,
    on_progress: Callable[[str, float], None],
) -> tuple[str, ...]:
    """Build `model` into `out`, replay its golden samples and return the notes of the build."""
    from deploykit.building.build import build

    source, shapes = Artefact.open(model), Shapes()
    if load_profile(profile).runtime == "tensorrt":
        batched = source.manifest is None or any(s.batched for s in source.manifest.inputs)
        kept = out.parents[1] / TIMING_FILE
        sizes, *axes = batch.split(";")
        number = machines.gpu_number(device)
        shapes = Shapes(sizes if batched else None, axes, device=number, timing_cache=kept)
    made = build(source, profile, shapes=shapes, out=out, on_progress=span(on_progress, 0.0, 0.9))
    prove(out, device, span(on_progress, 0.9, 1.0))
    return made.notes


def prove(engine: Path, device: str, on_progress: Callable[[str, float], None]) -> None:
    """Open an engine as the server does, and replay its golden samples. Raises GateFailed."""
    on_progress("replaying the golden samples", 0.0)
    artefact = Artefact.open(engine)
    manifest = artefact.manifest
    if manifest is None:
        raise BadInput(f"{engine}: has no manifest next to it")
    if manifest.evidence.wrong:
        raise GateFailed(f"{engine}: {manifest.evidence.wrong}")
    (opened,) = open_proven(artefact, device)
    with opened:
        parity, why = prove_engine(opened, engine, manifest, None, engine.name)
    if parity is None:
        log.warning("%s: its golden samples were not replayed: %s", engine.name, why)
    else:
        parity.raise_if_over()
