"""Serve engines over HTTP and gRPC: open and prove them, watch their files, shadow them."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, os_reason
from deploykit.core.extras import check_installed
from deploykit.core.files import StrPath, check_readable
from deploykit.core.machine import return_large_blocks
from deploykit.core.subprocesses import run_apart
from deploykit.engines.engine import Engine
from deploykit.evaluation.verify import open_proven
from deploykit.pipelines.pipeline import ServedPipelines, models_to_serve
from deploykit.serving import processes as multiprocess
from deploykit.serving.models.reload import Reloader, Source
from deploykit.serving.models.shadow import Shadow, check_reference
from deploykit.serving.observe import logs
from deploykit.serving.observe.tracing import Tracer
from deploykit.serving.opening import Opening
from deploykit.serving.options import ServeOptions
from deploykit.serving.processes import Workers
from deploykit.serving.running_server import RunningServer

if TYPE_CHECKING:
    from deploykit.serving.models.repository import ModelRepository
    from deploykit.serving.running_server import OnStart
    from deploykit.serving.server import Server
    from deploykit.serving.workers.group import ServerGroup


# The strings of the command line that say what to serve, and how.

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,128})=(?P<file>.+)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
SIZES = re.compile(r"(?P<name>[^=]+)=(?P<value>\d{1,9}(,\d{1,9})*)")
PAD = re.compile(r"(?P<name>[^=]+)=(?P<value>[-+]?(inf|nan|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?))", re.I)


def name_models(values: Sequence[str]) -> dict[str, Path]:
    """`FILE` or `NAME=FILE` by name. Raises BadInput."""
    files: dict[str, Path] = {}
    for text in values:
        match = _NAMED.fullmatch(text)
        path = Path(match["file"] if match else text)
        name = match["name"] if match else path.stem
        given, equals, _ = text.partition("=")
        if equals and not match and "/" not in given and not path.exists():
            raise BadInput(
                f"{text}: '{given}' cannot be the name of a model"
                if not _NAME.fullmatch(given)
                else f"{text}: the file is missing",
                hint="NAME=FILE, with a NAME of 1 to 128 letters, digits, '.', '_' or '-'",
            )
        if name in files:
            raise BadInput(f"{text}: the name '{name}' is taken", hint="give it another: NAME=FILE")
        files[name] = path
    return files


def name_shadows(shadows: Sequence[str], models: Sequence[str]) -> dict[str, Path]:
    """Shadows by the model that they belong to."""
    found: dict[str, Path] = {}
    for text in shadows:
        match = _NAMED.fullmatch(text)
        if not match and len(models) > 1:
            raise BadInput(f"`shadow` {text}: of which model?", hint="`shadow` NAME=FILE")
        name = match["name"] if match else "".join(models[:1])
        if name not in models or name in found:
            raise BadInput(
                f"`shadow` {text}: " + ("is given twice" if name in found else "no such model"),
                hint="served here: " + ", ".join(models),
            )
        found[name] = Path(match["file"] if match else text)
    return found


def read_token(file: Path | None) -> str | None:
    """The first line of the file. Raises BadInput."""
    if file is None:
        return None
    try:
        first = check_readable(file).read_text("utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = os_reason(exc) if isinstance(exc, OSError) else "is not text"
        raise BadInput(f"`token_file` {file}: {reason}") from exc
    if not first:
        raise BadInput(f"`token_file` {file}: its first line is empty")
    return first


def assignments(
    parameter: str, values: Sequence[str], form: re.Pattern[str], example: str, hint: str
) -> dict[str, str]:
    """Strings NAME=VALUE as a dict. Raises BadInput for another form, or a name given twice."""
    found: dict[str, str] = {}
    for each in values:
        match = form.fullmatch(each)
        if not match or match["name"] in found:
            raise BadInput(f"`{parameter}` {each}: {example} is needed, each name once", hint=hint)
        found[match["name"]] = match["value"]
    return found


log = logging.getLogger(__name__)

_SHADOW_THREADS = 1  # of the reference: it must not take the cores from what serves

Models = ArtefactLike | Sequence[ArtefactLike] | Mapping[str, ArtefactLike]


@checked
def serve(
    models: Models = (),
    *,
    pipelines: Models = (),
    host: str = "127.0.0.1",
    http_port: int = 0,
    grpc_port: int | None = 0,
    device: str = "auto",
    threads: int | None = None,
    instances: int = 1,
    workers: int | str = 1,
    max_batch: int = 32,
    batching: bool = True,
    assume_batched: bool = False,
    max_delay_us: int = 0,
    preferred: Sequence[int] = (),
    slo_ms: float | None = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
    pad: Mapping[str, float] | None = None,
    queue: int = 1024,
    timeout_ms: int = 30_000,
    max_body_bytes: int = 64 << 20,
    max_held_bytes: int | None = None,
    trust: bool = False,
    cpu_fallback: bool = False,
    cuda_graphs: bool = True,
    overlap: bool = True,
    reload: bool = True,
    shared_memory: bool = False,
    token: str | None = None,
    tls_cert: StrPath | None = None,
    tls_key: StrPath | None = None,
    origins: Sequence[str] = (),
    shadows: Mapping[str, ArtefactLike] | None = None,
    shadow_rate: float = 0.01,
    shadow_alarm: float = 0.01,
    otlp: str | None = None,
) -> RunningServer:
    """Serve models over HTTP and gRPC from a thread of this process; return when it is ready.

    `models`, `pipelines`: a file, several, or files by name. Port 0: a free one; `grpc_port` None:
    HTTP alone. `instances`: engines per model. `workers`: how many processes share the ports, each
    with its engines; "shared:2": two, and one more that runs the engines of both, as for a GPU; or
    "auto". Several are children of this process, end with it, and log to its stderr. `max_batch`:
    samples in one call; `batching` False: requests are never joined, `assume_batched`: without a
    trial. `slo_ms`: adapt batch and delay to keep p99 below. `cuda_graphs`, `overlap`: run batches
    of TensorRT engines as CUDA graphs, and submit the next one before the last is done. `buckets`:
    pad a dynamic axis to these sizes, {"T": (16, 32)}, with the values of `pad`. `queue`: waiting
    requests per model. `shadows`: by model, a file that repeats some requests.

    Raises BadInput, NotFound, MissingExtra, Unsupported (no such device), GateFailed (its proof).
    """
    settings = _settings(locals())
    check_installed(*PACKAGES)
    files, steps = _files_by_name(models), _files_by_name(pipelines)
    references = [f"{name}={file}" for name, file in (shadows or {}).items()]
    opening = Opening(device, threads, instances, trust, cpu_fallback)
    wanted = multiprocess.parse_workers(workers)
    how = partial(_prepare, files, steps, references, settings, opening, reload, wanted)
    return RunningServer(partial(_run_here_or_apart, how), settings)


def _run_here_or_apart(
    prepare: Callable[[], tuple[_Service, Workers]], on_start: OnStart, stop: socket
) -> int:
    """Serve from this thread, or with several workers from other processes."""
    service, chosen = prepare()
    if not chosen.several:
        return service.run(on_start)
    start = service.run, service.settings, service.names, on_start
    return multiprocess.run_workers_apart(chosen, *start, stop)


def _settings(given: Mapping[str, Any]) -> ServeOptions:
    """The options among the arguments of `serve`."""

    converted = {
        **{name: tuple(given[name]) for name in ("preferred", "origins")},
        **{name: given[name] and Path(given[name]) for name in ("tls_cert", "tls_key")},
        "buckets": {axis: tuple(sizes) for axis, sizes in (given["buckets"] or {}).items()},
        "pad": given["pad"] or {},
    }
    names = {each.name for each in fields(ServeOptions)}
    return ServeOptions(**{n: converted.get(n, value) for n, value in given.items() if n in names})


def serve_until_stopped(
    engines: Sequence[str] | Callable[[], Sequence[str]],
    *,
    device: str = "auto",
    threads: int | None = None,
    instances: int = 1,
    trust: bool = False,
    cpu_fallback: bool = False,
    reload: bool = True,
    pipelines: Sequence[str] = (),
    shadows: Sequence[str] = (),
    token_file: Path | None = None,
    buckets: Sequence[str] = (),
    pads: Sequence[str] = (),
    log_format: str = "text",
    workers: int | str = 1,
    on_start: OnStart | None = None,
    on_serve: Callable[[Server], None] | None = None,
    **options: Any,
) -> int:
    """Serve until SIGTERM or Ctrl-C, for the command line; its strings are read here.

    `engines`, `pipelines`, `shadows`: `FILE` or `NAME=FILE`, for a shadow NAME is optional where
    there is one model; `engines` may be a function that finds them, called once the options are
    known to be right. `token_file`: its first line is the token. `buckets`: `AXIS=16,32`, `pads`:
    `INPUT=0`. `log_format`: text or json lines on stderr. `workers`: processes that share the
    ports, each with its engines; "shared:2": two, and one that runs the engines of both, as it is
    on a GPU; or "auto". `on_start`: called once the ports are open, before the
    first request is read; with several workers, where there is no server. `on_serve`: called with
    each server, in its process. `options`: those of `ServeOptions`. Returns how many accepted
    requests were left unanswered.
    """
    check_installed(*PACKAGES)
    hint = "deploykit inspect shows the names of the axes and inputs"
    sizes = assignments("buckets", buckets, SIZES, "AXIS=16,32,64", hint)
    values = assignments("pad", pads, PAD, "INPUT=VALUE", hint)
    settings = ServeOptions(
        token=read_token(token_file),
        buckets={axis: tuple(map(int, each.split(","))) for axis, each in sizes.items()},
        pad={name: float(value) for name, value in values.items()},
        **options,
    )
    opening = Opening(device, threads, instances, trust, cpu_fallback)
    wanted = multiprocess.parse_workers(workers)
    started = on_start or (lambda *_: None)

    with logs.configure(log_format):
        files = name_models(engines() if callable(engines) else engines)
        steps = name_models(pipelines)
        service, chosen = _prepare(files, steps, shadows, settings, opening, reload, wanted)
        run = partial(service.run, on_serve=on_serve)
        if not chosen.several:
            return run(started)
    return multiprocess.run_workers(chosen, run, settings, log_format, service.names, started)


def _prepare(
    files: Mapping[str, Path],
    pipelines: Mapping[str, Path],
    shadows: Sequence[str],
    settings: ServeOptions,
    opening: Opening,
    reload: bool,
    wanted: Workers,
) -> tuple[_Service, Workers]:
    """What to serve, checked, and from how many processes."""
    job = models_to_serve, dict(pipelines), dict(files)
    apart = pipelines and wanted.several  # they may start threads, for which a fork waits for ever
    served = run_apart("`pipelines`", *job) if apart else job[0](*job[1:])
    references = name_shadows(shadows, list(served))
    _check(files, pipelines, references, settings)
    chosen = multiprocess.choose_workers(wanted, served, opening)
    opening = replace(opening, threads=multiprocess.threads_each(opening, chosen))
    names = [*served, *pipelines]
    return _Service(files, pipelines, references, settings, opening, reload, names), chosen


def _check(
    files: Mapping[str, Path],
    pipelines: Mapping[str, Path],
    references: Mapping[str, Path],
    settings: ServeOptions,
) -> None:
    """Raise BadInput for options that contradict each other, and files that cannot be read."""
    if not files and not pipelines:
        raise BadInput("no engine to serve", hint="give one as FILE or NAME=FILE")
    if settings.preferred and not settings.max_delay_us and settings.slo_ms is None:
        raise BadInput(
            "`preferred` has no effect without `max_delay_us` or `slo_ms`",
            hint="a request waits for a preferred batch size as long as `max_delay_us` says",
        )
    if settings.pad and not settings.buckets:
        raise BadInput(
            "`pad` has no effect without `buckets`", hint="`buckets` T=16,32 pads axis T to 16, 32"
        )
    if references and not settings.shadow_rate:
        raise BadInput("`shadow` needs a `shadow_rate` above 0")
    for file in (*files.values(), *references.values()):
        check_readable(file)


PACKAGES = ("orjson", "uvloop", "httptools", "google.protobuf", "hpack", "prometheus_client")


@dataclass(frozen=True)
class _Service:
    """What any process of a server runs; can be pickled. `references`: files of shadows."""

    files: Mapping[str, Path]
    pipelines: Mapping[str, Path]
    references: Mapping[str, Path]
    settings: ServeOptions
    opening: Opening
    reload: bool
    names: list[str]

    def run(
        self,
        on_start: OnStart,
        on_serve: Callable[[Server], None] | None = None,
        group: ServerGroup | None = None,
        shared: Path | None = None,
    ) -> int:
        """Open the models and serve them until the server is stopped.

        `group`: the processes that share the ports, if there are several; `shared`: see `load`.
        """
        from deploykit.serving import server as http
        from deploykit.serving.workers.group import ServerGroup

        settings, references, otlp = self.settings, self.references, self.settings.otlp
        steps = ServedPipelines(self.pipelines, self.files)
        group = group or ServerGroup()
        return_large_blocks()
        with ExitStack() as stack:
            if group.engines is not None:  # another process has them, shadows and traces them
                models: dict[str, Sequence[Engine]] = {
                    name: [engine] * engine.count for name, engine in group.engines.items()
                }
                sources: dict[str, Source] = {}
                references, otlp = {}, None
            else:
                opening = replace(self.opening, shared=shared)
                models, sources = _open(steps.files, opening, settings, group, stack)
            _check_pad(settings, models)
            shadowing = _shadows(references, models, settings, stack) if references else {}
            live = {} if group.runs_engines else steps.live(models)
            server = http.Server(models, settings, group=group, pipelines=live)
            _watch(server.repository, shadowing, otlp, stack)
            if sources and self.reload:
                _reload(server.repository, sources, group, stack)
            if on_serve is not None:
                on_serve(server)

            def ready(host: str, port: int, grpc_port: int | None) -> None:
                on_start(server, host, port, grpc_port, self.names)

            if threading.current_thread() is threading.main_thread():
                return http.run_alone(server, ready)
            return server.run(ready)  # in the process of a user's program


def _open(
    files: Mapping[str, Path],
    opening: Opening,
    settings: ServeOptions,
    group: ServerGroup,
    stack: ExitStack,
) -> tuple[dict[str, Sequence[Engine]], dict[str, Source]]:
    """The models by name, which `stack` closes, and where they come from."""

    sources = {
        name: Source(file, partial(opening, file, settings), opening.check)
        for name, file in files.items()
    }
    models: dict[str, Sequence[Engine]] = {}
    for name, source in sources.items():
        models[name] = source.open()
        for engine in models[name]:
            stack.callback(engine.close)
            if group.count > 1 and not group.runs_engines:
                multiprocess.check_on_cpu(name, engine.device)
    return models, sources


def _check_pad(settings: ServeOptions, models: Mapping[str, Sequence[Engine]]) -> None:
    """Raise BadInput for an input to pad that no served model pads."""
    inputs = [spec for engines in models.values() for spec in engines[0].inputs]
    padded = {s.name for s in inputs if any(axis in settings.buckets for axis in s.shape[1:])}
    for name in settings.pad:
        if name not in padded:
            known = ", ".join(sorted(padded)) or "none"
            raise BadInput(
                f"`pad` {name}: no served model has an input '{name}' with an axis in `buckets`",
                hint=f"the padded inputs are: {known}",
            )


def _watch(
    repository: ModelRepository,
    shadowing: Mapping[str, Shadow],
    otlp: str | None,
    stack: ExitStack,
) -> None:
    """Add shadows, traces and the logs' figures."""

    repository.add_metrics(logs.samples)
    for name, shadow in shadowing.items():
        repository.find(name).watch(shadow)
        repository.add_metrics(shadow.samples)
    if otlp is not None:
        tracer = stack.enter_context(Tracer(otlp))
        repository.add_metrics(tracer.samples)
        for name, model in repository.models.items():
            model.watch(tracer.watch(name))


def _reload(
    repository: ModelRepository,
    sources: Mapping[str, Source],
    group: ServerGroup,
    stack: ExitStack,
) -> None:
    """Replace engines whose files change."""

    reloader = stack.enter_context(Reloader(repository, sources, announce=group.announce))
    repository.add_metrics(reloader.samples)
    for name, model in repository.models.items():
        model.remark = partial(reloader.error, name)


def _files_by_name(models: Models) -> dict[str, Path]:
    if isinstance(models, Mapping):
        return {name: Path(file) for name, file in models.items()}
    several = [models] if isinstance(models, (str, os.PathLike, Artefact)) else models
    return name_models([str(each) for each in several])


def _shadows(
    references: Mapping[str, Path],
    models: Mapping[str, Sequence[Engine]],
    options: ServeOptions,
    stack: ExitStack,
) -> dict[str, Shadow]:
    """By model, what runs a share of its live requests again on what they should agree with."""

    found = {}
    for name, file in references.items():
        (reference,) = open_proven(file, "cpu", threads=_SHADOW_THREADS)
        stack.callback(reference.close)
        check_reference(models[name][0], reference)
        shadow = Shadow(name, reference, rate=options.shadow_rate, alarm=options.shadow_alarm)
        found[name] = stack.enter_context(shadow)
    return found
