"""`deploykit bundle` and `boot`: from the workstation to a device or a cluster."""

from __future__ import annotations

from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from deploykit.cli import output, tables
from deploykit.cli.options import JSON, api_arguments, described
from deploykit.cli.output import Progress
from deploykit.cli.serve import (
    SERVE_PAGE,
    ServeArguments,
    fields_as_options,
    raise_if_dropped,
    service_options,
    show_ready,
)

if TYPE_CHECKING:
    from deploykit.deploying.boot import Booted

# `boot` serves the bundle's model alone, from a file that nobody replaces
_NOT_OF_BOOT = {
    each.name: f"--{each.name.replace('_', '-')}"
    for each in fields(ServeArguments)
    if each.name in ("models", "engine", "pipeline", "trust", "reload")
    or each.name.startswith("shadow")
}


@described(f"""
MODEL                  An .onnx file
--profile PROFILE      The hardware target; NAME@MODE for a power mode
-o --out DIR|DIR.tar   The folder to write; with DIR.tar the same as one file, too
--to                   Where it will run: a container on one machine, or a cluster's server
--name NAME            The name to serve it under [the file's]
--batch MIN,OPT,MAX    Smallest, usual and largest batch
--axis NAME=MIN,OPT,MAX  The same for another dynamic axis; may be repeated
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
    to: Literal["docker", "triton", "kserve", "ray"] = "docker",
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


def _boot_arguments() -> type:
    """The bundle, the cache, and the options of `serve` that remain."""
    hints = get_type_hints(ServeArguments)
    own: list[tuple[str, Any, Any]] = [
        ("bundle", Path, field(default=MISSING)),
        ("cache", Path, field(default=MISSING)),
        ("rollback", bool, field(default=False)),
        ("retry", bool, field(default=False)),
    ]
    served = [each for each in fields(ServeArguments) if each.name not in _NOT_OF_BOOT]
    shared = [(each.name, hints[each.name], field(default=each.default)) for each in served]
    return make_dataclass("BootArguments", [*own, *shared], frozen=True)


def _boot_page() -> str:
    own = """
BUNDLE                 The folder that `deploykit bundle` wrote for this device
--cache DIR            Folder for its engines, kept from one start to the next
--rollback             Serve the previous engine from now on
--retry                Build an engine again that failed or was rolled back
"""
    gone = ("[NAME=]FILE", *_NOT_OF_BOOT.values())
    lines = [line for line in SERVE_PAGE.splitlines() if line and not line.startswith(gone)]
    return own + "\n".join(lines)


@described(_boot_page())
@fields_as_options(_boot_arguments())
def boot(options: Any) -> None:
    """Build a bundle's engine on this device, check its outputs and serve it.

    Later starts take the engine from the cache, unless something changed that it depends on; if a
    new engine fails, the previous one serves. The ports open when the engine is ready.

    Example: deploykit boot /bundle --cache /engines --host 0.0.0.0
    """
    from deploykit.deploying import boot as booting

    def ready(host: str, http: int, grpc: int | None, models: list[str], booted: Booted) -> None:
        show_ready(options, host, http, grpc, models, engine=booted.to_dict())

    own = ("bundle", "cache", "rollback", "retry")
    shared = {name: value for name, value in service_options(options).items() if name not in own}
    dropped = booting.boot_until_stopped(
        options.bundle,
        options.cache,
        rollback=options.rollback,
        retry=options.retry,
        on_ready=ready,
        **shared,
    )
    raise_if_dropped(dropped)
