"""`deploykit serve`, `load` and `health`: run a server, load it and check it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

import typer

from deploykit.cli import output, tables
from deploykit.cli.commands import ENGINE, FORCE, JSON, LINK, api_arguments, described
from deploykit.cli.output import Progress
from deploykit.cli.prove import axis_sizes
from deploykit.core.errors import BadInput
from deploykit.core.files import StrPath, read_text
from deploykit.serving.options import ServeOptions, addresses

_PAGE = f"""
[NAME=]FILE             The {ENGINE}s to serve
--engine [NAME=]FILE    The same as [NAME=]FILE, as an option; may be repeated
--config FILE.toml      Read options from this file
--pipeline [NAME=]FILE  A .py or .toml file: models with steps around them; may be repeated
--device auto|cpu|cuda|cuda:N  Where the model runs
--trust                 Also run a TensorRT engine whose results cannot be verified here, or one
                        that brings code from elsewhere
Address:
--host ADDRESS|unix:FILE  Address to listen on; unix:FILE is a socket for HTTP, with one for gRPC at
                        FILE.grpc
--http-port PORT        Port for HTTP; 0 picks a free one
--grpc-port PORT|none   Port for gRPC; 0 picks a free one, none serves HTTP alone
Batching:
--max-batch N           Largest number of samples per call; 1 never joins requests
--assume-batched        Join requests without a trial that answers stay the same
--max-delay-us MICROSECONDS  How long to wait for more requests
--slo-ms MS             Adapt batch and queue, and cut the delay, to keep p99 below this
--buckets AXIS=16,32,64[:INPUT=VALUE]  Pad a dynamic axis to these sizes, to share batches, and an
                        input with VALUE instead of 0; may be repeated
Limits:
--queue N               Requests that may wait, per model; more are answered 503
--stall-s SECONDS       Longest pause of a client that sends a request or reads an answer
--idle-s SECONDS        How long a connection without a request is kept
--max-connection-age-s SECONDS  Then a gRPC client is asked to connect again, so that new replicas
                        get a share of the load [never]
--timeout-ms MS         Longest wait of a request; then it is answered 504
--drain-s SECONDS       How long to go on answering after SIGTERM, not ready, so that load balancers
                        notice
--max-body-bytes BYTES  Largest request
--max-pixels N          Largest image; decoding takes 8 bytes for each pixel
--max-held-bytes BYTES  Memory for all large requests and answers together [a quarter of the memory]
Engines:
--instances N           Engines per model
--threads N             CPU threads per call [one per core]
--workers N|shared:N|auto  Processes behind the same ports, each with its own engines; with
                        shared:N, or N and a GPU, one more process runs the engines of all; auto
                        measures and chooses
--cpu-fallback          Run an ONNX model on the CPU if the GPU cannot
--reload/--no-reload    Load a model again when its file changes
--shared-memory         Let clients pass tensors in shared memory
Security:
--token-file FILE       The first line is the token that clients must send
--tls-cert FILE.pem     Certificate for HTTPS
--tls-key FILE.pem      Its private key
--tls-client-ca FILE.pem  Only clients with a certificate of this CA may connect
--allowed-host NAME     Also answer requests for this host, as a proxy in front passes them on:
                        example.org, *.example.org or *; may be repeated
--root-path PATH        The path at which a proxy in front offers this server
--origin URL            Web pages from there may call this server; may be repeated
Monitoring:
--shadow [NAME=]FILE    Run some live requests again on this model and compare the answers
--access-log            Log one line for each request: client, route, status and time
--otlp URL              Send OpenTelemetry traces to http(s)://HOST:PORT
--log                   Format of the log on stderr; json: the ready line on stdout is JSON, too"""
_FOR_PYTHON = ("models", "token", "pad")  # the command line has other ways
_TYPED = {"http_port": (int, 8000), "grpc_port": (str, "8001"), "workers": (str, "1")}


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a function that takes any keyword arguments the options of `serve`, as on `_PAGE`."""
    rows: dict[str, tuple[Any, Any]] = {
        "models": (list[str] | None, None),
        "engine": (list[str] | None, None),
        "config": (Path | None, None),
    }
    hints = get_type_hints(ServeOptions)
    for each in fields(ServeOptions):
        if each.name not in _FOR_PYTHON:
            kind, default = _TYPED.get(each.name, (hints[each.name], each.default))
            if default == ():
                kind, default = list[str] | None, None
            rows[each.name] = Path | None if kind == StrPath | None else kind, default
    rows["log"] = Literal["text", "json"], "text"
    only = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, only, default=default, annotation=kind)
        for name, (kind, default) in rows.items()
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return described(_PAGE)(function)


@_with_options
def serve(**given: Any) -> None:
    """Serve models over HTTP and gRPC, with dynamic batching.

    Each option may also be an environment variable (DEPLOYKIT_HTTP_PORT=9000) or a key of the
    --config file (http_port = 9000). A flag overrides a variable, a variable the file.

    Example: deploykit serve mnist=model.int8.onnx --http-port 8000
    """
    from deploykit.serving import serve as service

    options = serve_options(given)
    dropped = service.serve_until_stopped(
        options,
        log_format=given["log"],
        on_start=lambda _server, *ready: show_ready(options, given["log"], *ready),
    )
    raise_if_dropped(dropped)


def serve_options(given: Mapping[str, Any]) -> ServeOptions:
    """Read the options from the command line, variables and a file. Raises BadInput."""
    port = given["grpc_port"].lower()
    if port != "none" and not (port.isascii() and port.isdigit()):
        raise BadInput(f"`grpc_port` {given['grpc_port']}: must be a port, or none")
    others = {each.name for each in fields(ServeOptions)} - {"models", "grpc_port"}
    return ServeOptions(
        [*(given["engine"] or ()), *(given["models"] or ())],
        grpc_port=None if port == "none" else int(port),
        **{n: each for n, each in given.items() if n in others and each not in (None, [])},
    )


def raise_if_dropped(dropped: int) -> None:
    """Exit 1 if the server ended without answering all accepted requests."""
    if dropped:
        output.note(f"warning: {dropped} accepted requests were not answered")
        raise typer.Exit(1)


@described(f"""
URL                    The server: http://HOST:PORT, below a path http://HOST/PATH, or
                       grpc://HOST:PORT; with TLS https:// and grpcs://; a Unix socket unix:FILE
--model NAME           Which model, if the server has several [the only one]
--rate N               Open loop: send this many requests per second
                       [half of what 32 connections reach in 2 s]
--concurrency N        Closed loop: this many connections, each of which waits for its answer
--duration SECONDS     How long to measure
--batch N              Size of the batch axis in each request
--slo-ms MS            Also count the answers within this time
--fail-on CONDITIONS   Exit 1 if one of these holds, such as 'p99>20ms,errors>0,throughput<500'
--data FILE|DIR        Inputs to send: an .npz, such as FILE.golden.npz; for a task or a
                       pipeline, images or other files as they are [random]
--text TEXT            A sentence to send to a task or a pipeline; may be repeated
--expect FILE          Golden samples, or answers.jsonl of a pipeline: send their inputs and compare
                       the answers
--max-error X          Largest max |a-b| / max |a| of an answer, with --expect
--axis NAME=SIZE       Size of another dynamic axis; may be repeated
--token-file FILE      The first line is the token that the server wants
--ca-file FILE         Certificates to trust in place of the system's
--cert-file FILE.pem   The client's certificate and private key, where the server wants one
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
    axis: list[str] | None = None,
    token_file: Path | None = None,
    ca_file: Path | None = None,
    cert_file: Path | None = None,
    out: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Measure a running server under load.

    Example: deploykit load http://127.0.0.1:8000 --rate 200 --fail-on 'p99>20ms,errors>0'
    """
    given = api_arguments(locals())
    given["axes"] = axis_sizes("axis", ",".join(given.pop("axis") or ()))
    if (file := given.pop("token_file")) is not None:
        given["token"] = read_text(file).partition("\n")[0].strip()
    from deploykit.loadtest import load as loading

    with Progress("load", bar_only=True) as progress:
        result = loading.load_test(**given, command=output.command_line(), on_progress=progress)
    output.show(result, tables.load(result), as_json=as_json)
    result.raise_if_unmet()


def show_ready(
    options: ServeOptions,
    log: str,
    host: str,
    http_port: int,
    grpc_port: int | None,
    models: list[str],
    **more: Any,
) -> None:
    """Print where the server listens: JSON for scripts, addresses to click on for people.

    `more`: further keys of the JSON.
    """
    place, grpc = addresses(host, http_port, grpc_port)
    if log == "json" or not sys.stdout.isatty():
        import json  # late: `--help` does not need it

        ready = {"event": "ready", "http": place, "grpc": grpc, "models": models}
        output.line(json.dumps(ready | more))
        return
    scheme = "https" if options.tls_cert else "http"
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared only
        place = f"localhost:{http_port}"
    url = place if place.startswith("unix:") else f"{scheme}://{place}"
    lines = [
        f"{output.bold('Serving')} {', '.join(map(output.one_line, models))}",
        f"  dashboard  {url}/",
        f"  how to     {url}/docs",
        f"  gRPC       {grpc}" if grpc else "  gRPC       off",
        "Press Ctrl-C to stop.",
    ]
    output.line("\n".join(lines))


# `deploykit health` is the health check of a container.


@described("""
URL                    Server, or unix:FILE; by default 127.0.0.1, port $DEPLOYKIT_HTTP_PORT or 8000
""")
def health(url: str | None = None) -> None:
    """Ask a running server whether it is ready; exit 1 if not.

    Example: deploykit health http://127.0.0.1:8000
    """
    from deploykit.serving import client as probe

    port = os.environ.get("DEPLOYKIT_HTTP_PORT", "8000")
    port = "8000" if LINK.match(port) else port
    url = url or f"http://127.0.0.1:{port}"
    probe.health(url)
    output.line(f"{url} is ready")
