"""Start a bundle on its device: check it, build and prove its engine if needed, and serve it.

The ports open once the engine is proven. Until then health checks fail, so their start period must
be longer than a build. A build runs in a separate process. If it fails or is killed, the previous
engine serves.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.building.builder import Shapes
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, DeploykitError, GateFailed
from deploykit.core.files import StrPath, write_errors
from deploykit.core.machine import this_machine
from deploykit.core.profile import Profile, load_profile, with_gpu
from deploykit.core.runtime import RUNTIMES
from deploykit.core.subprocesses import run_apart
from deploykit.deploying import STARTED
from deploykit.deploying import device as machines
from deploykit.deploying.folder import Bundle, read_bundle, verify
from deploykit.deploying.slots import (
    TIMING_FILE,
    Booted,
    CacheState,
    EngineCache,
    EngineKey,
    decide,
)
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
    found = _read(folder)
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
            labels, previous = (
                {"model": model.name, "version": VERSION},
                booted.source == "previous",
            )
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


def _read(folder: Path) -> Bundle:
    if folder.is_file():
        raise BadInput(f"{folder}: is a file; a bundle is a folder", hint="unpack a .tar: tar -xf")
    found = read_bundle(folder)
    if found.kind not in STARTED:
        raise BadInput(
            f"{folder}: is a bundle for {found.kind}, which does not start by itself",
            hint="deploykit bundle MODEL --to docker",
        )
    return found


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
    state: CacheState = CacheState()  # noqa: RUF009 - frozen
    booted: Booted = Booted("build", "", "")  # noqa: RUF009 - frozen

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
