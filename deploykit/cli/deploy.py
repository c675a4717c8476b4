"""`deploykit bundle` and `boot`: from the workstation to a device or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from deploykit.cli import output, tables
from deploykit.cli.commands import JSON, api_arguments, described
from deploykit.cli.output import Progress
from deploykit.cli.serve import raise_if_dropped, serve_options, show_ready
from deploykit.core.errors import BadInput
from deploykit.deploying import WRITERS

if TYPE_CHECKING:
    from deploykit.deploying.boot import Booted

    BundleKind = str
else:
    BundleKind = Literal[tuple(WRITERS)]  # typer reads the choices


@described(f"""
MODEL                  An .onnx file
--profile PROFILE      The hardware target; NAME@MODE for a power mode
-o --out DIR|DIR.tar   The folder to write; with DIR.tar the same as one file, too
--to                   Where it will run: a container on one machine, or a cluster's server
--name NAME            The name to serve it under [the file's]
--batch MIN,OPT,MAX    Sizes of the batch axis: smallest, usual and largest
--axis NAME=MIN,OPT,MAX  Sizes of another dynamic axis; may be repeated
--samples FILE.npz|DIR  Inputs for the samples that the device replays [those kept with the
        model, else random]
--wheels               Bring the Python packages, for a target without a network
--release RELEASE      The target's JetPack or CUDA: jetpack-6.2, cuda-12 [the profile's usual one]
--force                Replace a bundle that somebody changed
{JSON}""")
def bundle(
    model: Path,
    profile: str,
    out: Path,
    to: BundleKind = "docker",
    name: str | None = None,
    batch: str = "1,8,32",
    axes: list[str] | None = None,
    samples: Path | None = None,
    wheels: bool = False,
    release: str | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Bundle a model with all that a device or a cluster needs.

    Example: deploykit bundle model.fp16.onnx --profile jetson-orin-nx-16gb -o bundle
    """
    given = api_arguments(locals()) | {"axes": axes or ()}
    from deploykit.deploying import bundle as bundling

    with Progress(f"bundle for {profile}") as progress:
        result = bundling.bundle(**given, on_progress=progress)
    output.show(result, tables.bundled(result), as_json=as_json)


@described("""
BUNDLE                 The folder that `deploykit bundle` wrote for this device
--cache DIR            Folder for its engines, kept from one start to the next
--rollback             Serve the previous engine from now on
--retry                Build an engine again that failed or was rolled back
--serve-config FILE.toml  Read options of `serve` from this file, as its --config""")
def boot(
    context: typer.Context,
    bundle: Path,
    cache: Path,
    rollback: bool = False,
    retry: bool = False,
    serve_config: Path | None = None,
) -> None:
    """Build a bundle's engine on this device, check its outputs and serve it.

    Later starts take the engine from the cache, unless something changed that it depends on; if a
    new engine fails, the previous one serves. The ports open when the engine is ready. Options of
    `serve` come from --serve-config, or from variables such as DEPLOYKIT_HOST=0.0.0.0.

    Example: deploykit boot /bundle --cache /engines
    """
    from deploykit.deploying import boot as booting

    words = [] if serve_config is None else [f"--config={serve_config}"]
    command: Any = context.find_root().command
    with command.commands["serve"].make_context("boot", words, parent=context.parent) as served:
        given = served.params
    for name in ("engine", "pipelines", "shadows", "trust"):
        if given[name]:
            raise BadInput(f"`{name}`: `boot` serves the model of the bundle alone")
    options = serve_options(given)

    def ready(*address: Any, booted: Booted) -> None:
        show_ready(options, given["log"], *address, engine=booted.to_dict())

    dropped = booting.boot_until_stopped(
        bundle,
        cache,
        options,
        rollback=rollback,
        retry=retry,
        log_format=given["log"],
        on_ready=ready,
    )
    raise_if_dropped(dropped)
