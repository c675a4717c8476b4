"""`deploykit doctor`, `profiles` and `demo`: this machine, the hardware targets, the whole tour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.cli import output, tables
from deploykit.cli.commands import FORCE, JSON, described
from deploykit.cli.output import Part, Progress
from deploykit.cli.tables import UNKNOWN, VERSIONS, memory, mix, rate
from deploykit.core.runtime import RUNTIMES
from deploykit.evaluation.formatting import Table

if TYPE_CHECKING:
    from deploykit.core.profile import Profile
    from deploykit.engines.devices import GpuState
    from deploykit.evaluation.doctor import Health

# Hardware as text: profiles as a list and as cards, and the results of `doctor`.


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


# key of a profile -> its name on a card, and its format
_FIGURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "compute_capability": ("compute capability", str),
    "sm_count": ("multiprocessors", str),
    "memory_bytes": ("memory", _gib),
    "bandwidth_bytes_per_s": ("bandwidth", lambda value: rate(value, 1e9, "GB/s")),
    "workspace_bytes": ("build workspace", _gib),
    "max_power_w": ("power", lambda value: f"{value:g} W at most"),
    "dla_cores": ("DLA cores", str),
    "opset": ("export opset", str),
}


def profile_list(found: Sequence[Profile]) -> list[Part]:
    def star(profile: Profile, key: str) -> str:
        return "*" if marks(profile, key) else " "

    rows = [
        (
            profile.name,
            profile.runtime,
            memory(profile.memory_bytes) + star(profile, "memory_bytes"),
            rate(profile.bandwidth_bytes_per_s, 1e9, "GB/s")
            + star(profile, "bandwidth_bytes_per_s"),
            *(
                rate(profile.peak_ops_per_s.get(name), 1e12, "T")
                + star(profile, f"peak_ops_per_s.{name}")
                for name in ("fp16", "int8")
            ),
            " ".join(profile.precisions),
        )
        for profile in found
    ]
    header = ("profile", "runtime", "memory", "bandwidth", "fp16/s", "int8/s", "precisions")
    return [
        Table("", header, rows, (0, 6)),
        "",
        "Peaks are dense. *: derived, or not verified. One in full: deploykit profiles NAME",
    ]


def card(found: Profile) -> list[Part]:
    """Describe one profile: each figure with its derivation, or that it is not verified."""
    peaks = [f"peak_ops_per_s.{name}" for name in found.peak_ops_per_s]
    rows = []
    for key in (*_FIGURES, *peaks):
        name = key.rpartition(".")[2]
        value = found.peak_ops_per_s[name] if key in peaks else getattr(found, key)
        if value:
            title, shown = _FIGURES.get(key, (f"peak {name}", lambda peak: rate(peak, 1e12, "T/s")))
            rows.append((title, shown(value), marks(found, key)))
    lines: list[Part] = [f"{found.name}: {found.summary}", f"runs {_runs(found)}"]
    if rows:
        lines += ["", Table("", ("figure", "value", "how it is known"), rows, (0, 1, 2))]
    if found.power_modes:
        modes = [
            (
                mode.name + " (chosen)" * (mode.name == found.power_mode),
                *("-" if v is None else f"{v:g}" for v in (mode.watts, mode.gpu_mhz, mode.sms)),
            )
            for mode in found.power_modes
        ]
        title = "power mode" + " (not verified)" * ("power_modes" in found.unverified)
        lines += ["", Table("", (title, "W", "GPU MHz", "SMs"), modes)]
    if found.container_base:
        images = list(found.container_base.items())
        lines += ["", Table("", ("host", "container image to start from"), images, (0, 1))]
    known = [f"GPU name: {name}" for name in found.gpu_names if not found.boards]
    known += [f"board: {board}" for board in found.boards]
    lines += ["", *[f"recognised by {'; '.join(known)}"] * bool(known)]
    lines += [f"note: {text}" for text in found.notes]
    return lines + [f"source: {text}" for text in found.sources]


def _runs(found: Profile) -> str:
    """Describe the runtime and its versions, architecture, precisions and kind of figures."""
    low, high = found.tensorrt_min, found.tensorrt_max
    versions_of = f" {low} to {high}" if low and high else f" {low} or later" if low else ""
    if high and not low:
        versions_of = f" up to {high}"
    where = "" if found.architecture == "any" else f" on {found.architecture}"
    text = f"{RUNTIMES[found.runtime].title}{versions_of}{where} in {', '.join(found.precisions)}"
    if found.peak_ops_per_s:
        text += "; peaks are dense, of the GPU alone"
    return text + "; CPU and GPU share the memory" * found.unified_memory


def marks(found: Profile, key: str) -> str:
    """Return a figure's derivation, and a mark if it is not verified."""
    how = [f"derived: {found.derived[key]}"] if key in found.derived else []
    return "; ".join(how + ["not verified"] * (key in found.unverified))


def state(gpu: GpuState) -> str:
    """Describe a GPU's load, power, clock, temperature and throttling, as far as known."""
    rails = ", ".join(f"{name} {watts:.1f}" for name, watts in gpu.rails)
    parts = [
        f"{gpu.utilization:.0%} busy" if gpu.utilization is not None else "",
        f"{gpu.power_w:.1f} W" if gpu.power_w is not None else "",
        f"rails in W: {rails}" if rails else "",
        f"{gpu.clock_hz / 1e6:.0f} MHz" if gpu.clock_hz is not None else "",
        f"at most {gpu.clock_max_hz / 1e6:.0f} MHz" if gpu.clock_max_hz is not None else "",
        *([f"{gpu.temperature_c:.0f} °C"] if gpu.temperature_c is not None else ()),
        f"throttled: {', '.join(gpu.throttled)}" if gpu.throttled else "",
        "not throttled" if gpu.throttled == () else "",
    ]
    known = [part for part in parts if part]
    return "; ".join(known)


def health_lines(result: Health) -> list[Part]:
    machine = result.machine
    lines: list[Part] = [
        f"machine    {machine.cpu}, {memory(machine.memory_bytes)}",
        f"cores      {machine.physical_cores} physical, {machine.usable_cores} usable",
        f"system     {machine.system}, {machine.architecture}, Python {machine.python}",
        f"features   {' '.join(machine.cpu_features) or UNKNOWN}",
    ]
    for gpu in machine.gpus:
        lines.append(
            f"gpu        {gpu.name}, {memory(gpu.memory_bytes)}, driver {gpu.driver}, "
            f"compute capability {gpu.compute_capability or UNKNOWN}"
        )
    if not machine.gpus and not result.gpus:
        lines.append("gpu        none found (no nvidia-smi, or it lists none)")
    if machine.board or machine.l4t:
        lines.append(
            f"jetson     {machine.board or UNKNOWN}, JetPack {machine.jetpack or UNKNOWN} "
            f"(L4T {machine.l4t or UNKNOWN}), power mode {machine.power_mode or UNKNOWN}"
        )
    lines += [f"state      {text}" for gpu in result.gpus if (text := state(gpu))]
    lines.append(f"profile    {result.profile or 'none'}: {result.why}")
    lines.append(f"packages   {mix(machine.packages, VERSIONS)}")
    lines.append(f"providers  {' '.join(result.providers) or 'none: onnxruntime is not installed'}")
    rows = [
        (check.command, "works" if check.works else "does not work", check.why)
        for check in result.checks
    ]
    lines += ["", Table("", ("command", "here", "what is missing"), rows, (0, 1, 2))]
    return lines + [f"warning: {text}" for text in result.warnings]


@described(JSON)
def doctor(as_json: bool = False) -> None:
    """Show what this machine has and which commands work on it.

    Example: deploykit doctor
    """
    from deploykit.evaluation import doctor as health

    result = health.doctor()
    output.show(result, health_lines(result), as_json=as_json)


@described(f"PROFILE  Show this profile in full\n{JSON}")
def profiles(name: str | None = None, as_json: bool = False) -> None:
    """List the hardware targets with their figures and sources.

    Example: deploykit profiles jetson-orin-nano-8gb@15W
    """
    from deploykit.core.profile import load_profile, profile_names

    found = [load_profile(item) for item in ([name] if name else profile_names())]
    if as_json:
        documents = [profile.to_dict() for profile in found]
        output.show_json(documents[0] if name else documents)
    else:
        output.show_parts(card(found[0]) if name else profile_list(found))


@described(f"""
-o --out DIR           Folder for the models and the report
{FORCE}
--quick                Measure briefly; the report is marked as such
{JSON}""")
def demo(
    out: Path = Path("out"), force: bool = False, quick: bool = False, as_json: bool = False
) -> None:
    """Run all steps, from training to serving, on real data.

    Example: deploykit demo --quick -o out
    """
    from deploykit import demonstration as tour

    with Progress("demo") as progress:
        result = tour.demo(out, force=force, quick=quick, on_progress=progress, on_step=output.note)
    output.show(result, tables.demo(result), as_json=as_json)
