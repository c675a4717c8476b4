"""`deploykit serve` and `deploykit load`: a server, and load on one."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import typer

from deploykit.cli import output, tables
from deploykit.cli.options import DEVICE, ENGINE, FORCE, JSON, TRUST, api_arguments, described
from deploykit.cli.output import Progress
from deploykit.cli.prove import axis_sizes, sizes


@dataclass(frozen=True)
class ServeArguments:
    """The options of `serve`; their flags are also the keys of its configuration file."""

    models: list[str] | None = None
    engine: list[str] | None = None
    pipeline: list[str] | None = None
    config: Path | None = None
    device: str = "auto"
    trust: bool = False
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    grpc: bool = True
    max_batch: int = 32
    batching: bool = True
    assume_batched: bool = False
    max_delay_us: int = 0
    preferred: str | None = None
    slo_ms: float | None = None
    buckets: list[str] | None = None
    pad: list[str] | None = None
    queue: int = 1024
    timeout_ms: int = 30_000
    max_body_bytes: int = 64 << 20
    max_held_bytes: int | None = None
    instances: int = 1
    threads: int | None = None
    workers: str = "1"
    cpu_fallback: bool = False
    cuda_graphs: bool = True
    overlap: bool = True
    reload: bool = True
    shared_memory: bool = False
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origin: list[str] | None = None
    shadow: list[str] | None = None
    shadow_rate: float = 0.01
    shadow_alarm: float = 0.01
    log: Literal["text", "json"] = "text"
    otlp: str | None = None


_RENAMED = {"engine", "models", "pipeline", "grpc", "pad", "origin", "shadow", "log"}
_CONVERTED = {*_RENAMED, "config", "grpc_port", "preferred", "buckets"}  # not passed on as they are
SERVE_PAGE = f"""
[NAME=]FILE            The {ENGINE}s to serve
--engine [NAME=]FILE   The same as [NAME=]FILE, as an option; may be repeated
--pipeline [NAME=]FILE  A .py or .toml file: models with steps around them; may be repeated
--config FILE.toml     Read options from this file
{DEVICE}
{TRUST}
Address:
--host ADDRESS         Address to listen on
--http-port PORT       Port for HTTP; 0 picks a free one
--grpc-port PORT       Port for gRPC; 0 picks a free one
--grpc/--no-grpc       Serve gRPC too
Batching:
--max-batch N          Largest number of samples per call
--batching/--no-batching  Join requests if a trial shows that answers stay the same
--assume-batched       Join requests without that trial
--max-delay-us MICROSECONDS  How long to wait for more requests
--preferred N,N,...    Batch sizes worth waiting for, within --max-delay-us
--slo-ms MS            Adapt batch and delay to keep p99 below this
--buckets AXIS=16,32,64  Pad a dynamic axis to these sizes, to share batches; may be repeated
--pad INPUT=VALUE      What to pad an input with; may be repeated [0]
Limits:
--queue N              Requests that may wait, per model; more are answered 503
--timeout-ms MS        Longest wait of a request; then it is answered 504
--max-body-bytes BYTES  Largest request
--max-held-bytes BYTES  Memory for all large requests and answers together [a quarter of the memory]
Engines:
--instances N          Engines per model
--threads N            CPU threads per call [one per core]
--workers N|shared:N|auto  Processes behind the same ports, each with its own engines; with
                       shared:N, or N and a GPU, one more process runs the engines of all;
                       auto measures and chooses
--cpu-fallback         Run an ONNX model on the CPU if the GPU cannot
--cuda-graphs/--no-cuda-graphs  Run batches of TensorRT engines as CUDA graphs
--overlap/--no-overlap  Submit a batch to a TensorRT engine before the last one is done
--reload/--no-reload   Load a model again when its file changes
--shared-memory        Let clients pass tensors in shared memory
Security:
--token-file FILE      The first line is the token that clients must send
--tls-cert FILE.pem    Certificate for HTTPS
--tls-key FILE.pem     Its private key
--origin URL           Web pages from there may call this server; may be repeated
Monitoring:
--shadow [NAME=]FILE   Run some live requests again on this model and compare the answers
--shadow-rate 0-1      Share of the requests to run again
--shadow-alarm 0-1     Share of different answers that raises an alarm
--log                  Format of the log on stderr; json: the ready line on stdout is JSON, too
--otlp URL             Send OpenTelemetry traces to http(s)://HOST:PORT
"""


def fields_as_options(kind: type) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Make a command of a function of one dataclass: its fields become the options."""

    def decorate(function: Callable[[Any], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            function(kind(**values))

        hints = get_type_hints(kind)
        parameters = [
            each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for each in inspect.signature(kind).parameters.values()
        ]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__annotations__ = hints
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


@described(SERVE_PAGE)
@fields_as_options(ServeArguments)
def serve(options: ServeArguments) -> None:
    """Serve models over HTTP and gRPC, with dynamic batching.

    Each option may also be an environment variable (DEPLOYKIT_HTTP_PORT=9000) or a key of the
    --config file (http_port = 9000). A flag overrides a variable, a variable the file.

    Example: deploykit serve mnist=model.int8.onnx --http-port 8000
    """
    from deploykit.serving import serve as service

    dropped = service.serve_until_stopped(
        [*(options.engine or ()), *(options.models or ())],
        pipelines=options.pipeline or (),
        shadows=options.shadow or (),
        on_start=lambda _server, *ready: show_ready(options, *ready),
        **service_options(options),
    )
    raise_if_dropped(dropped)


def service_options(options: Any) -> dict[str, Any]:
    """Those that `serve` and `boot` share, as `serve_until_stopped` takes them."""
    same = {name: value for name, value in vars(options).items() if name not in _CONVERTED}
    return {
        **same,
        "grpc_port": options.grpc_port if options.grpc else None,
        "preferred": tuple(sizes("preferred", options.preferred)) if options.preferred else (),
        "buckets": options.buckets or (),
        "pads": options.pad or (),
        "origins": tuple(options.origin or ()),
        "log_format": options.log,
    }


def raise_if_dropped(dropped: int) -> None:
    """Exit 1 where the server ended without an answer to what it had accepted."""
    if dropped:
        output.note(f"warning: {dropped} accepted requests were not answered")
        raise typer.Exit(1)


@described(f"""
URL                    The server, http://HOST:PORT or grpc://HOST:PORT
--model NAME           Which model, if the server has several [the only one]
--rate N               Open loop: send this many requests per second
                       [half of what 32 connections reach in 2 s]
--concurrency N        Closed loop: this many connections, each of which waits for its answer
--duration SECONDS     How long to measure
--batch N              Samples per request
--slo-ms MS            Also count the answers within this time
--fail-on CONDITIONS   Exit 1 if one of these holds, such as 'p99>20ms,errors>0,throughput<500'
--data FILE|DIR        Inputs to send: an .npz, such as FILE.golden.npz; for a task or a
                       pipeline, images or other files as they are [random]
--text TEXT            A sentence to send to a task or a pipeline; may be repeated
--expect FILE          Golden samples, or answers.jsonl of a pipeline: send their inputs and compare
                       the answers
--max-error X          Largest max |a-b| / max |a| of an answer, with --expect
--axis NAME=SIZE,...   Sizes of dynamic axes other than the batch
-o --out DIR           Write a report into this folder
{FORCE}
{JSON}""")
def load(
    url: str,
    model: str | None = None,
    rate: float | None = None,
    concurrency: int | None = None,
    duration_s: float = 10.0,
    batch: int = 1,
    slo_ms: float | None = None,
    fail_on: str | None = None,
    data: Path | None = None,
    text: list[str] | None = None,
    expect: Path | None = None,
    max_error: float = 1e-3,
    axis: str | None = None,
    out: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Measure a running server under load.

    Example: deploykit load http://127.0.0.1:8000 --rate 200 --fail-on 'p99>20ms,errors>0'
    """
    given = api_arguments(locals())
    given["axes"] = axis_sizes("axis", given.pop("axis") or "")
    from deploykit.loadtest import load as loading

    with Progress("load", bar_only=True) as progress:
        command = shlex.join(["deploykit", *sys.argv[1:]])
        result = loading.load_test(**given, command=command, on_progress=progress)
    output.show(result, tables.load(result), as_json=as_json)
    result.raise_if_unmet()


def show_ready(
    options: Any,
    host: str,
    http_port: int,
    grpc_port: int | None,
    models: list[str],
    **more: Any,
) -> None:
    """Tell where the server listens: JSON for scripts, addresses to click on for people.

    `more`: what the JSON also holds.
    """
    place = f"[{host}]" if ":" in host else host
    grpc = None if grpc_port is None else f"{place}:{grpc_port}"
    if options.log == "json" or not sys.stdout.isatty():
        import json  # late: `--help` does without

        ready = {"event": "ready", "http": f"{place}:{http_port}", "grpc": grpc, "models": models}
        output.line(json.dumps(ready | more))
        return
    scheme = "https" if options.tls_cert else "http"
    reachable = "localhost" if host in ("0.0.0.0", "::") else place  # noqa: S104 - compared only
    url = f"{scheme}://{reachable}:{http_port}"
    lines = [
        f"{output.bold('Serving')} {', '.join(map(output.one_line, models))}",
        f"  dashboard  {url}/",
        f"  how to     {url}/docs",
        f"  gRPC       {grpc}" if grpc else "  gRPC       off",
        "Press Ctrl-C to stop.",
    ]
    output.line("\n".join(lines))


# `deploykit health`: the health check of a container.


@described(f"""
URL                    The server; without it 127.0.0.1, port $DEPLOYKIT_HTTP_PORT or 8000
--timeout SECONDS      Longest wait for its answer
{JSON}""")
def health(url: str | None = None, timeout_s: float = 5.0, as_json: bool = False) -> None:
    """Ask a running server whether it is ready; exit 1 if not.

    Example: deploykit health http://127.0.0.1:8000
    """
    from deploykit.serving import health as probe

    port = os.environ.get("DEPLOYKIT_HTTP_PORT", "8000")
    result = probe.health(url or f"http://127.0.0.1:{port}", timeout_s=timeout_s)
    output.show(result, [f"{result.url} is ready"], as_json=as_json)
