"""Serve engines over HTTP and gRPC: open and prove them, watch their files, shadow them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.open import open_proven
from deploykit.core.artefact import sniff
from deploykit.core.errors import BadInput, Unsupported, os_reason
from deploykit.core.files import check_readable
from deploykit.core.machine import return_large_blocks, usable_cores

if TYPE_CHECKING:
    from deploykit.runtimes.engine import Engine
    from deploykit.serving.models.shadow import Shadow
    from deploykit.serving.observe.tracing import Tracer
    from deploykit.serving.options import ServeOptions

log = logging.getLogger(__name__)

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,128})=(?P<file>.+)")
_SIZES = re.compile(r"(?P<axis>[^=]+)=(?P<sizes>\d{1,9}(,\d{1,9})*)")
_PAD = re.compile(r"(?P<name>[^=]+)=(?P<value>[^=]+)")
_SHADOW_THREADS = 1  # of the reference: it must not take the cores from what serves

OnReady = Callable[[str, int, "int | None", list[str]], None]  # host, HTTP port, gRPC port, names


def serve(
    engines: Sequence[str],
    *,
    device: str = "auto",
    threads: int | None = None,
    instances: int = 1,
    trust: bool = False,
    cpu_fallback: bool = False,
    reload: bool = True,
    shadows: Sequence[str] = (),
    token_file: Path | None = None,
    buckets: Sequence[str] = (),
    pads: Sequence[str] = (),
    log_format: str = "text",
    on_ready: OnReady | None = None,
    **options: Any,
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns how many accepted requests were left unanswered.

    `engines`, `shadows`: `FILE` or `NAME=FILE`; a name left out is the file's, without its
    extension, and for a shadow the only model's. `instances`: engines a model, which share its
    queue. `trust`: see `open_proven`. `cpu_fallback`: an ONNX model whose `device` is not to be had
    runs on the CPU, and says so wherever it is shown. `reload`: take over a file that is replaced.
    `token_file`: its first line is what a client must send. `buckets`: `AXIS=16,32`, `pads`:
    `INPUT=0`. `log_format`: text or json lines on stderr. `options`: those of `ServeOptions`.
    `on_ready(host, http_port, grpc_port, names)` is called when requests are taken; without gRPC
    its port is None.
    """
    from deploykit.serving import server as http
    from deploykit.serving.models.reload import Reloader, Source
    from deploykit.serving.observe import logs

    settings = http.ServeOptions(
        token=_token(token_file), buckets=_buckets(buckets), pad=_pads(pads), **options
    )
    files = _named("--engine", engines)
    if not files:
        raise BadInput("no engine to serve", hint="--engine FILE or --engine NAME=FILE")
    references = _references(shadows, list(files))
    if references and not settings.shadow_rate:
        raise BadInput("--shadow: needs a --shadow-rate above 0")
    return_large_blocks()
    with ExitStack() as stack:
        stack.enter_context(logs.configure(log_format))
        opening = partial(
            _open,
            device=device,
            threads=threads,
            instances=instances,
            trust=trust,
            cpu_fallback=cpu_fallback,
        )
        sources = {name: Source(file, partial(opening, file)) for name, file in files.items()}
        models: dict[str, Sequence[Engine]] = {}
        for name, source in sources.items():
            models[name] = source.load()
            for engine in models[name]:
                stack.callback(engine.close)
        shadowing = _shadows(references, models, settings, stack)
        tracer = _tracer(settings.otlp, stack)
        server = http.Server(models, settings)
        server.service.files.update(files)
        server.service.add_metrics(logs.samples)
        for name, shadow in shadowing.items():
            server.service.find(name).watch(shadow)
            server.service.add_metrics(shadow.samples)
        if tracer is not None:
            server.service.add_metrics(tracer.samples)
            for name, model in server.service.models.items():
                model.watch(tracer.watch(name))
        if reload:
            reloader = stack.enter_context(Reloader(server.service, sources))
            server.service.add_metrics(reloader.samples)
            for name, model in server.service.models.items():
                model.remark = partial(reloader.error, name)

        def ready(at_host: str, at_port: int, at_grpc_port: int | None) -> None:
            if on_ready is not None:
                on_ready(at_host, at_port, at_grpc_port, list(models))

        return server.run(ready)


def _open(
    file: Path,
    *,
    device: str,
    threads: int | None,
    instances: int,
    trust: bool,
    cpu_fallback: bool,
) -> Sequence[Engine]:
    if instances < 1:
        raise BadInput(f"--instances {instances}: 1 or more is needed")
    if threads is None and instances > 1:
        threads = max(1, usable_cores() // instances)
    try:
        return open_proven(file, device, threads=threads, trust=trust, instances=instances)
    except Unsupported as exc:
        if not (cpu_fallback and device.startswith("cuda") and sniff(file) == "onnx"):
            raise
        engines: list[Any] = open_proven(file, "cpu", threads=threads, instances=instances)
        for engine in engines:
            engine.notes = (*engine.notes, f"runs on the CPU, not on {device}: {exc.message}")
        log.warning("%s: %s", file, engines[0].notes[-1])
        return engines


def _shadows(
    references: Mapping[str, Path],
    models: Mapping[str, Sequence[Engine]],
    options: ServeOptions,
    stack: ExitStack,
) -> dict[str, Shadow]:
    """By model, what runs a share of its live requests again on what they should agree with."""
    from deploykit.serving.models.shadow import Shadow, check_reference

    found = {}
    for name, file in references.items():
        (reference,) = open_proven(file, "cpu", threads=_SHADOW_THREADS)
        stack.callback(reference.close)
        check_reference(models[name][0], reference)
        shadow = Shadow(name, reference, rate=options.shadow_rate, alarm=options.shadow_alarm)
        found[name] = stack.enter_context(shadow)
    return found


def _tracer(endpoint: str | None, stack: ExitStack) -> Tracer | None:
    if endpoint is None:
        return None
    from deploykit.serving.observe.tracing import Tracer

    return stack.enter_context(Tracer(endpoint))


def _named(option: str, texts: Sequence[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for text in texts:
        match = _NAMED.fullmatch(text)
        path = Path(match["file"] if match else text)
        name = match["name"] if match else path.stem
        if name in files:
            raise BadInput(
                f"{option} {text}: the name '{name}' is taken", hint="give it another: NAME=FILE"
            )
        files[name] = path
    return files


def _references(shadows: Sequence[str], models: Sequence[str]) -> dict[str, Path]:
    """Shadows by the model that they belong to."""
    found: dict[str, Path] = {}
    for text in shadows:
        match = _NAMED.fullmatch(text)
        if not match and len(models) > 1:
            raise BadInput(f"--shadow {text}: of which model?", hint="--shadow NAME=FILE")
        name = match["name"] if match else models[0]
        if name not in models or name in found:
            raise BadInput(
                f"--shadow {text}: " + ("is given twice" if name in found else "no such model"),
                hint="served here: " + ", ".join(models),
            )
        found[name] = Path(match["file"] if match else text)
    return found


def _token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        first = check_readable(file).read_text("utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = os_reason(exc) if isinstance(exc, OSError) else "is not text"
        raise BadInput(f"--token-file {file}: {reason}") from exc
    if not first:
        raise BadInput(f"--token-file {file}: its first line is empty")
    return first


def _buckets(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        match = _SIZES.fullmatch(text)
        if not match or match["axis"] in found:
            raise BadInput(
                f"--buckets {text}: AXIS=16,32,64 is needed, each axis once",
                hint="deploykit inspect shows the names of the axes",
            )
        found[match["axis"]] = tuple(map(int, match["sizes"].split(",")))
    return found


def _pads(texts: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        match = _PAD.fullmatch(text)
        try:
            value = float(match["value"]) if match else None
        except ValueError:
            value = None
        if match is None or value is None or match["name"] in found:
            raise BadInput(f"--pad {text}: INPUT=VALUE is needed, each input once")
        found[match["name"]] = value
    return found
