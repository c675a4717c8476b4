"""Builds with a fake TensorRT: what reaches it, and what is recorded about the plan."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deploykit.building.tensorrt import build as tensorrt
from deploykit.building.tensorrt import module
from deploykit.building.tensorrt.build import build, check, precision_flags
from deploykit.building.tensorrt.options import HARDWARE, AxisRange, Options
from deploykit.building.tensorrt.progress import BuildProgress
from deploykit.core.errors import MissingExtra, NotFound, Unsupported
from deploykit.core.extras import install_command
from deploykit.core.files import sha256
from deploykit.core.profile import load_profile
from scripts.nvidia import fetch
from tests.support.graphs.protos import to_half
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.fake_tensorrt import NO_FORMATS, Severity, Use, options, replaced


def test_the_plan_is_written_as_it_came(use: Use, model: Path, out: Path) -> None:
    does = use()
    build(model, out, options())
    assert out.read_bytes() == does.plan


def test_the_facts_say_what_a_plan_is_bound_to(use: Use, model: Path, out: Path) -> None:
    use(version="10.3.0.26")
    facts = build(model, out, options(version_compatible=True, hardware_compatible="ampere-plus"))
    built_on = facts.built_on
    assert built_on["tensorrt"] == "10.3.0.26"
    assert (built_on["model"], built_on["profile"], built_on["batch"]) == ("m.onnx", "l4", "1,4,8")
    assert built_on["hardware_compatible"] == "ampere-plus"
    assert built_on["typing"] == "strong"
    assert all(isinstance(value, str) for value in built_on.values())


@pytest.mark.parametrize("number", [0, 1], ids=["TensorRT 11", "TensorRT 10"])
def test_strong_typing_is_asked_for_by_name(use: Use, model: Path, out: Path, number: int) -> None:
    does = use(strong_number=number)
    facts = build(model, out, options())
    assert does.seen["strong"] == [True]
    assert facts.flags_used == ("STRONGLY_TYPED",)


def test_profile_and_options_reach_the_builder(use: Use, model: Path, out: Path) -> None:
    does = use()
    build(model, out, options(version_compatible=True))
    config = does.seen["config"]
    assert does.seen["shapes"] == {"x": ((1, 4), (4, 4), (8, 4))}
    assert does.seen["WORKSPACE"] == load_profile("l4").workspace_bytes
    assert config.profiling_verbosity == "DETAILED"
    assert config.flags == ["VERSION_COMPATIBLE"]


def test_without_tensorrt_the_extra_is_named(model: Path, out: Path) -> None:
    with replaced("tensorrt", None), pytest.raises(MissingExtra) as caught:
        build(model, out, options())
    assert install_command("tensorrt") in (caught.value.hint or "")


def test_a_profile_that_ends_before_this_tensorrt_is_refused(
    use: Use, model: Path, out: Path
) -> None:
    use(version="11.4.0")
    old = replace(load_profile("l4"), tensorrt_max="10.16")
    with pytest.raises(Unsupported, match=r"TensorRT 10\.3 to 10\.16, the installed one is 11"):
        build(model, out, options(old))


@pytest.mark.parametrize("level", HARDWARE)
def test_a_hardware_compatibility_level_reaches_the_builder(
    use: Use, model: Path, out: Path, level: str
) -> None:
    does = use(hardware="NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY")
    facts = build(model, out, options(hardware_compatible=level))
    config = does.seen["config"]
    assert config.hardware_compatibility_level == level.upper().replace("-", "_")
    assert facts.built_on["hardware_compatible"] == level


# weak typing, where strong typing has gaps


def test_older_flags_are_used_where_strong_typing_is_refused_with_a_note(
    use: Use, model: Path, out: Path
) -> None:
    does = use(version="10.3.0", strong_error=NO_FORMATS, dtypes=("FLOAT", "HALF", "INT8", "FP8"))
    facts = build(model, out, options())
    assert does.seen["strong"] == [True, False]
    assert facts.flags_used == ("FP16", "INT8", "FP8")
    assert does.seen["config"].flags == ["FP16", "INT8", "FP8"]
    assert facts.built_on["typing"] == "weak"
    assert "refused the strongly typed network" in facts.notes[0]
    assert "could not find any supported formats" in facts.notes[0]


def test_no_kernel_for_a_node_is_answered_with_the_older_flags(
    use: Use, model: Path, out: Path
) -> None:
    line = "Error Code 10: Internal Error (Could not find any implementation for node gemm.)"
    does = use(version="10.3.0", strong_error=line, dtypes=("FLOAT", "HALF"))
    assert build(model, out, options()).flags_used == ("FP16",)
    assert does.seen["strong"] == [True, False]


@pytest.mark.parametrize("version", ["10.12.0", "10.13.3", "11.4.0"])
def test_later_tensorrt_is_never_given_the_older_flags(
    use: Use, model: Path, out: Path, version: str
) -> None:
    does = use(version=version, strong_error=NO_FORMATS)
    with pytest.raises(Unsupported, match="could not find any supported formats"):
        build(model, out, options())
    assert does.seen["strong"] == [True]


def test_another_error_is_not_answered_with_the_older_flags(
    use: Use, model: Path, out: Path
) -> None:
    does = use(version="10.3.0", strong_error="no tactics within workspace limit")
    with pytest.raises(Unsupported, match="workspace"):
        build(model, out, options())
    assert does.seen["strong"] == [True]


def test_when_both_fail_the_first_reason_is_reported(use: Use, model: Path, out: Path) -> None:
    use(version="10.3.0", strong_error=NO_FORMATS, weak_error="something else")
    with pytest.raises(Unsupported, match="could not find any supported formats"):
        build(model, out, options())


# reading back


def test_layers_are_read_back_where_the_plan_can_be_loaded(
    use: Use, model: Path, out: Path
) -> None:
    layer = {"Name": "gemm", "LayerType": "gemm", "Inputs": [{"Format/Datatype": "Half"}]}
    use(layers=json.dumps({"Layers": [layer]}))
    facts = build(model, out, options())
    assert facts.layers is not None
    assert [(found.name, found.precision) for found in facts.layers] == [("gemm", "float16")]


def test_the_facts_become_json(use: Use, model: Path, out: Path) -> None:
    use(layers='{"Layers": ["a + b"]}')
    document = json.loads(json.dumps(build(model, out, options()).to_dict()))
    assert document["layers"][0]["onnx_nodes"] == ["a", "b"]
    assert document["flags_used"] == ["STRONGLY_TYPED"]


def test_a_version_compatible_plan_may_bring_its_own_code(use: Use, model: Path, out: Path) -> None:
    does = use(layers='{"Layers": []}')
    build(model, out, options(version_compatible=True))
    assert does.seen["host_code"] is True
    build(model, out, options())
    assert does.seen["host_code"] is False


@pytest.mark.parametrize("layers", [None, "{broken"])
def test_without_layers_the_plan_is_kept_and_the_reason_noted(
    use: Use, model: Path, out: Path, layers: str | None
) -> None:
    does = use(layers=layers)
    facts = build(model, out, options())
    assert facts.layers is None
    assert "could not be read back" in facts.notes[-1]
    assert out.read_bytes() == does.plan


# what else reaches the builder: formats, plugins, TF32; what comes back: warnings


def test_inputs_and_outputs_are_pinned_to_row_major_order(use: Use, model: Path, out: Path) -> None:
    does = use()
    build(model, out, options())
    assert [tensor.allowed_formats for tensor in does.seen["ends"]] == [1, 1]


def test_nvidias_own_plugins_are_registered_before_the_file_is_parsed(
    use: Use, model: Path, out: Path
) -> None:
    use(needs_plugins=True)
    build(model, out, options())
    assert out.exists()


@pytest.fixture(name="library", scope="module")
def library_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared library with the entry point of TensorRT's plugin registry."""
    path = tmp_path_factory.mktemp("plugin") / "libmine.so"
    try:
        fetch.library(path, "void *getPluginCreators(int *n) { *n = 0; return 0; }")
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc))
    return path


def test_a_plugin_library_is_loaded_and_recorded(
    use: Use, model: Path, out: Path, library: Path
) -> None:
    does = use()
    found = build(model, out, options(plugins=(library,)))
    assert does.seen["libraries"] == [str(library)]
    assert found.plugins == {str(library): sha256(library)}


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [(None, NotFound, "no such plugin library"), (b"text", Unsupported, "cannot be loaded")],
)
def test_a_library_that_does_not_load_is_named(
    use: Use, model: Path, out: Path, content: bytes | None, error: type, says: str
) -> None:
    use()
    wrong = out.with_name("libwrong.so")
    if content is not None:
        wrong.write_bytes(content)
    with pytest.raises(error, match=rf"libwrong\.so: {says}"):
        build(model, out, options(plugins=(wrong,)))
    assert not out.exists()


def test_tf32_is_left_on_unless_it_is_refused(use: Use, model: Path, out: Path) -> None:
    does = use()
    assert "tf32" not in build(model, out, options()).built_on
    assert "cleared" not in does.seen
    assert build(model, out, options(tf32=False)).built_on["tf32"] == "no"
    assert does.seen["cleared"] == ["TF32"]


def test_warnings_of_the_builder_become_notes_each_once(use: Use, model: Path, out: Path) -> None:
    lines = [f"[convert.cpp::f::1] weights of conv{n} overflow" for n in range(7)]
    use(warnings=(lines[0], lines[0] + "\nand a dump", *lines))
    notes = [note for note in build(model, out, options()).notes if "warn" in note]
    assert notes[:2] == [f"TensorRT warns: weights of conv{n} overflow" for n in range(2)]
    assert (len(notes), notes[5]) == (6, "TensorRT gave 2 more warnings: see `--debug`")


# log lines, types, TensorRT for RTX


def test_lines_are_collected_within_the_block_only(use: Use) -> None:
    use()
    nv = module.module()
    log, error = module.logger(nv), Severity.ERROR
    with module.collect_log(nv) as outer:
        with module.collect_log(nv) as inner:
            log.log(error, "first")
        log.log(error, "second")
    log.log(error, "third")
    assert (inner.errors, outer.errors) == (["first"], ["second"])
    assert module.logger(nv) is log


@pytest.mark.parametrize(
    ("dtypes", "flags"),
    [
        (["FLOAT", "INT64", "BOOL"], ()),
        (["HALF", "FLOAT"], ("FP16",)),
        (["BF16"], ("BF16",)),
        (["INT4", "HALF"], ("FP16", "INT4")),
    ],
)
def test_weak_typing_takes_its_flags_from_the_types(
    dtypes: list[str], flags: tuple[str, ...]
) -> None:
    assert precision_flags(dtypes) == flags


def test_a_plan_of_rtx_is_known_by_its_first_bytes() -> None:
    assert tensorrt.flavour_of(b"vtrt\0\0") == "rtx"
    assert tensorrt.flavour_of(b"ftrt\0\0") == "tensorrt"


def test_tensorrt_for_rtx_checks_where_it_alone_is_installed(use: Use, model: Path) -> None:
    use("tensorrt_rtx", version="1.7.1.116", plan=b"vtrt" + bytes(8))
    found = check(model, options())
    assert (found.accepted, found.flavour, found.plan_bytes) == (True, "rtx", 12)


def test_tensorrt_for_rtx_is_never_given_the_older_flags(use: Use, model: Path) -> None:
    does = use("tensorrt_rtx", version="1.7.1.116", strong_error=NO_FORMATS)
    assert "could not find any supported formats" in check(model, options()).problems[0]
    assert does.seen["strong"] == [True]


# memory, progress, interruption


def test_a_workspace_is_cut_to_the_free_memory_with_a_note(
    use: Use, model: Path, out: Path
) -> None:
    does = use()
    facts = build(model, out, options(free_bytes=1 << 30))
    assert 1000 << 20 < does.seen["WORKSPACE"] < 1 << 30
    assert "instead of 6,144 MiB" in facts.notes[0]
    assert build(model, out, options(free_bytes=8 << 30)).notes == facts.notes[1:]
    assert does.seen["WORKSPACE"] == 6 << 30


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
    ids=["ctrl-c", "sigterm"],
)
@pytest.mark.parametrize("again", [False, True])
def test_a_signal_stops_the_build_at_its_next_step_and_a_second_one_at_once(
    use: Use,
    model: Path,
    out: Path,
    number: signal.Signals,
    raised: type[BaseException],
    again: bool,
) -> None:
    """TensorRT may compute for minutes without a step."""
    out.write_bytes(b"previous")
    stopping, leave = threading.Event(), threading.Event()

    def on_progress(phase: str, share: float) -> None:
        if phase.startswith("stopping at TensorRT's next step"):
            stopping.set()

    def during_build() -> None:
        os.kill(os.getpid(), number)
        assert stopping.wait(20)
        if again:
            os.kill(os.getpid(), number)
            assert leave.wait(20)

    def exits(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    use(during_build=during_build)
    before = signal.signal(signal.SIGTERM, exits)
    try:
        with pytest.raises(raised):
            build(model, out, options(), on_progress)
    finally:
        signal.signal(signal.SIGTERM, before)
        leave.set()
    assert out.read_bytes() == b"previous"


def test_an_error_in_on_progress_comes_through(use: Use, model: Path, out: Path) -> None:
    use()

    def fails(text: str, share: float) -> None:
        if text == "Building engine":
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        build(model, out, options(), fails)
    assert not out.exists()


def test_progress_from_several_threads_never_falls_and_comes_one_call_at_a_time() -> None:
    """IProgressMonitor: "must be thread-safe", as several internal threads may call it."""
    shares: list[float] = []
    busy = threading.Lock()

    def on_progress(phase: str, share: float) -> None:
        assert busy.acquire(blocking=False)
        time.sleep(0)  # lets another thread in, where one is
        shares.append(share)
        busy.release()

    progress = BuildProgress(on_progress)
    progress.start("build", None, 4)

    def work(number: int) -> None:
        for step in range(50):
            progress.start(f"{number}.{step}", "build", 2)
            assert progress.step(f"{number}.{step}", 1)
            progress.finish(f"{number}.{step}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.failure is None
    assert len(shares) == 401
    assert shares == sorted(shares)


# what a Jetson's DLA takes


ON_DLA = {"Name": "{ForeignNode[gemm...relu]}", "LayerType": "DLA"}
ON_GPU = {"Name": "{ForeignNode[a...b]}", "LayerType": "Myelin"}
COPY = {"Name": "x to nvm", "LayerType": "Reformat"}
LAYERS = json.dumps({"Layers": [COPY, ON_DLA, ON_GPU]})


def on_dla(dla: int = 1) -> Options:
    return options("jetson-orin-nx-16gb", AxisRange(4, 4, 4), dla=dla)


@pytest.fixture(name="half")
def half_fixture(tmp_path: Path) -> Path:
    return save(to_half(linear(), "fp16", {})[0], tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("version", "typing"),
    [("10.3.0", ("GPU_FALLBACK",)), ("11.4.1", ("STRONGLY_TYPED", "GPU_FALLBACK"))],
)
def test_layers_on_the_dla_are_counted_and_the_core_is_set(
    use: Use, half: Path, out: Path, version: str, typing: tuple[str, ...]
) -> None:
    """Before TensorRT 11 precision is a flag; FLOAT alone, as here, needs none."""
    does = use(version=version, dla_cores=2, layers=LAYERS)
    facts = build(half, out, on_dla())
    config = does.seen["config"]
    assert (config.default_device_type, config.DLA_core) == ("DLA", 1)
    assert does.seen["runtime_dla"] == 1
    assert facts.flags_used == typing
    assert facts.built_on["dla"] == "1"
    assert "1 of 3 layers run on DLA core 1, the others on the GPU" in facts.notes


def test_an_engine_with_nothing_on_the_dla_is_refused(use: Use, half: Path, out: Path) -> None:
    use(version="10.3.0", dla_cores=2, layers=json.dumps({"Layers": [COPY, ON_GPU]}))
    with pytest.raises(Unsupported, match="none of its 2 layers runs on DLA core 1"):
        build(half, out, on_dla())
    assert not out.exists()


def test_without_layers_to_read_a_note_reports_an_unknown_number(
    use: Use, half: Path, out: Path
) -> None:
    use(version="10.3.0", dla_cores=2)
    assert "not known" in build(half, out, on_dla()).notes[-1]


def test_a_check_elsewhere_leaves_the_dla_out_and_says_so(use: Use, half: Path) -> None:
    use(dla_cores=0)
    found = check(half, on_dla(dla=0))
    assert found.accepted
    assert "checked for the GPU alone" in found.notes[0]
