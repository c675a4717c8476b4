"""Builds with a TensorRT made of Python: what reaches it, what is refused, what is recorded."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import deploykit as dk
from deploykit.building.builder import AxisRange, note_dla, parse_axis, parse_batch, ranges
from deploykit.building.tensorrt import (
    build_refusal,
    cache_path,
    check,
    error_of,
    monitor,
    parser_reasons,
    workspace_that_fits,
)
from deploykit.core.errors import BadInput, DeploykitError, MissingExtra, NotFound, Unsupported
from deploykit.core.evidence import Layer
from deploykit.core.extras import install_command
from deploykit.core.machine import Gpu, this_machine
from deploykit.core.profile import load_profile
from deploykit.core.tensors import parse_spec
from deploykit.engines.tensorrt.compatibility import LogLines
from tests.support.graphs.protos import to_half
from tests.support.onnx_zoo import linear, mnist_like, save
from tests.support.runtimes.fake_tensorrt import NO_FORMATS, FakeTensorRt, Rig, options, replaced

ONE = AxisRange(4, 4, 4)


# what reaches the builder, and what is recorded of the plan


def test_profile_and_options_reach_the_builder_and_its_plan_is_written(rig: Rig) -> None:
    does = rig.use(version="10.3.0.26", needs_plugins=True, strong_number=0)  # it is 1 elsewhere
    facts = rig.build(version_compatible=True, hardware_compatible="ampere-plus")
    assert rig.out.read_bytes() == does.plan
    config, on = does.seen["config"], facts.built_on
    assert does.seen["shapes"] == {"x": ((1, 4), (4, 4), (8, 4))}
    assert does.seen["WORKSPACE"] == load_profile("l4").workspace_bytes
    assert (config.profiling_verbosity, config.flags) == ("DETAILED", ["VERSION_COMPATIBLE"])
    assert [tensor.allowed_formats for tensor in does.seen["ends"]] == [1, 1]  # row-major
    assert (on["tensorrt"], on["model"], on["profile"]) == ("10.3.0.26", "m.onnx", "l4")
    assert (on["batch"], on["typing"]) == ("1,4,8", "strong")
    assert on["hardware_compatible"] == "ampere-plus"
    assert (does.seen["strong"], facts.flags_used[0]) == ([True], "STRONGLY_TYPED")
    assert "tf32" not in on  # left on, unless it is refused
    assert "cleared" not in does.seen
    assert rig.build(tf32=False).built_on["tf32"] == "no"
    assert does.seen["cleared"] == ["TF32"]


@pytest.mark.parametrize("error", [NO_FORMATS, "Could not find any implementation for node gemm."])
def test_older_flags_are_used_where_strong_typing_is_refused_with_a_note(
    rig: Rig, error: str
) -> None:
    dtypes, flags = ("FLOAT", "HALF", "INT8", "FP8"), ("FP16", "INT8", "FP8")
    does = rig.use(version="10.3.0", strong_error=error, dtypes=dtypes)
    facts = rig.build()
    assert does.seen["strong"] == [True, False]
    assert (facts.flags_used, tuple(does.seen["config"].flags)) == (flags, flags)
    assert facts.built_on["typing"] == "weak"
    assert "refused the strongly typed network" in facts.notes[0]
    assert error[-30:-1] in facts.notes[0]


@pytest.mark.parametrize(
    ("version", "strong", "weak", "says", "tried"),
    [
        *((each, NO_FORMATS, None, "any supported formats", 1) for each in ("10.12.0", "11.4.0")),
        ("10.3.0", "no tactics within workspace limit", "the same", "workspace", 2),
        ("10.3.0", NO_FORMATS, "something else", "any supported formats", 2),
    ],
)
def test_a_build_that_fails_gives_its_first_reason(
    rig: Rig, version: str, strong: str, weak: str | None, says: str, tried: int
) -> None:
    does = rig.use(version=version, strong_error=strong, weak_error=weak)
    with pytest.raises(Unsupported, match=says):
        rig.build()
    assert does.seen["strong"] == [True, False][:tried]
    assert not rig.out.exists()


def test_warnings_of_the_builder_become_notes_each_once(rig: Rig) -> None:
    lines = [f"[convert.cpp::f::1] weights of conv{n} overflow" for n in range(7)]
    rig.use(warnings=(lines[0], lines[0] + "\nand a dump", *lines))
    notes = [note for note in rig.build().notes if "warn" in note]
    assert notes[:2] == [f"TensorRT warns: weights of conv{n} overflow" for n in range(2)]
    assert (len(notes), notes[5]) == (6, "TensorRT gave 2 more warnings: see `--debug`")


@pytest.mark.parametrize("error", [None, NO_FORMATS])
def test_tensorrt_for_rtx_checks_where_it_alone_is_installed(rig: Rig, error: str | None) -> None:
    does = rig.use("tensorrt_rtx", version="1.7.1.116", plan=b"vtrt" + bytes(8), strong_error=error)
    found = check(rig.model, options())
    if error:
        assert "could not find any supported formats" in found.problems[0]
    else:
        assert (found.accepted, found.flavour, found.plan_bytes) == (True, "rtx", 12)
    assert does.seen["strong"] == [True]  # never the older flags


# what a target, a TensorRT or a file cannot give is refused before TensorRT builds

DLA: dict[str, Any] = {"profile": "jetson-orin-nx-16gb", "dla": 1, "batch": ONE}
NO_DLA = r"has no DLA: it exists up to 10\.7 .* and from 11\.4\.1"
OLD: dict[str, Any] = {"version": "10.3.0", "dla_cores": 2}
NANO = {"profile": "jetson-orin-nano-8gb"}
SAME = {"hardware_compatible": "same-compute-capability"}
AMPERE = {"hardware_compatible": "ampere-plus"}
TO_10_16 = replace(load_profile("l4"), tensorrt_max="10.16")


@pytest.mark.parametrize(
    ("given", "behaviour", "error", "words"),
    [
        (SAME, {"version": "10.3.0"}, Unsupported, "needs a newer TensorRT.*SAME_COMPUTE"),
        ({"hardware_compatible": "everything"}, {}, BadInput, "unknown level 'everything"),
        ({**NANO, **AMPERE}, {}, Unsupported, "profile jetson-orin-nano-8gb is a Jetson"),
        ({"profile": TO_10_16}, {"version": "11.4.0"}, Unsupported, r"10\.16, the installed one"),
        ({"free_bytes": 10 << 20}, {}, Unsupported, "64 MiB of workspace, but only 10 MiB are"),
        ({"dla": 0}, OLD, Unsupported, "profile l4 has no DLA"),
        ({"profile": "jetson-orin-nx-8gb", "dla": 1}, OLD, Unsupported, "has 1 DLA core, counted"),
        ({"profile": "jetson-agx-orin-64gb", "dla": -1}, OLD, Unsupported, "has 2 DLA cores"),
        (DLA, {**OLD, "version": "10.8.0"}, Unsupported, NO_DLA),
        (DLA, {**OLD, "version": "11.4.0.106"}, Unsupported, NO_DLA),
        (DLA, {**OLD, "dla_cores": 1}, Unsupported, "`dla` 1: TensorRT finds 1"),
        ({**DLA, "batch": AxisRange(1, 8, 32)}, OLD, BadInput, "a DLA takes no dynamic sizes"),
        ({**DLA, "axes": {"T": AxisRange(1, 2, 3)}}, OLD, BadInput, "takes no dynamic sizes"),
        ({**DLA, "model": None}, OLD, Unsupported, "FP16 and INT8 only, the graph is fp32"),
        ({}, {"version": "8.6.2"}, Unsupported, r"TensorRT 8\.6\.2 is installed.*no types"),
        ({}, {"driver": False}, Unsupported, "cannot start: no NVIDIA driver"),
        ({"plugins": (Path("libno.so"),)}, {}, NotFound, r"libno\.so: no such plugin library"),
        ({"plugins": (Path(__file__),)}, {}, Unsupported, r"test_tensorrt\.py: cannot be loaded"),
        ({"model": Path(__file__)}, {}, BadInput, r"_tensorrt\.py: is .* damaged ONNX file"),
        ({"model": Path("none.onnx")}, {}, NotFound, r"none\.onnx"),
    ],
)
def test_options_that_cannot_be_had_are_refused_with_the_reason(
    rig: Rig,
    tmp_path: Path,
    given: dict[str, Any],
    behaviour: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    does = rig.use(**behaviour)
    half = save(to_half(linear(), "fp16", {})[0], tmp_path / "half.onnx")
    with pytest.raises(error, match=words):
        rig.build(**{"model": half, **given})
    assert "strong" not in does.seen
    assert not rig.out.exists()


def test_without_tensorrt_the_extra_is_named(rig: Rig) -> None:
    with replaced("tensorrt", None), pytest.raises(MissingExtra) as caught:
        rig.build()
    assert install_command("tensorrt") in (caught.value.hint or "")


def test_weights_outside_the_models_folder_are_refused(rig: Rig) -> None:
    does = rig.use()
    onnx.save_model(linear(), rig.model, save_as_external_data=True, size_threshold=0, location="w")
    model = onnx.load(rig.model, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../w"
    with pytest.raises(BadInput, match="outside the model's folder"):
        rig.build(save(model, rig.model))
    assert "parsed" not in does.seen  # TensorRT would read the file


@pytest.mark.parametrize(
    ("profile", "option", "message"),
    [
        ("l4", {"device": -1}, "must be the number of a GPU, got -1"),
        ("l4", {"plugins": (Path("nope.so"),)}, "no such plugin library"),
        *(("l4", {"batch": text}, "`batch`") for text in ("8,1,2", "x", "1,2", "-1,2,3")),
        ("jetson-orin-nano-8gb", {"dla": 0}, "has no DLA"),
    ],
)
def test_wrong_options_are_named_before_the_missing_gpu(
    tmp_path: Path, profile: str, option: dict[str, Any], message: str
) -> None:
    source = save(mnist_like(), tmp_path / "m.onnx")
    with pytest.raises(DeploykitError, match=message):
        dk.build(source, profile, shapes=dk.Shapes(**option))


# sizes

BATCH = AxisRange(1, 8, 32)
WRONG = ["", "1,8", "a", "1,,3", "-1,2,3", "8,4,2", "1,9,8", "0,0,0", "1,1,2147483648"]


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (parse_batch, "1,8,32", AxisRange(1, 8, 32)),
        (parse_batch, "4", ONE),
        (parse_batch, " 1 , 2,3 ", AxisRange(1, 2, 3)),
        (parse_batch, "0,1,2", AxisRange(0, 1, 2)),
        (parse_axis, "T=16,128,512", ("T", AxisRange(16, 128, 512))),
        *((parse_batch, text, "`batch`") for text in WRONG),
        *((parse_axis, text, "`axes`") for text in ("16,128,512", "=1,2,3", "T", "T=", "T=5,4,3")),
    ],
)
def test_a_range_of_sizes_is_read(read: Callable[[str], Any], text: str, expected: Any) -> None:
    with pytest.raises(BadInput, match=expected) if type(expected) is str else nullcontext():
        assert read(text) == expected


AXES = {"T": AxisRange(1, 16, 64), "H": AxisRange(224, 224, 448), "P": AxisRange(1, 500, 1000)}
ROWS = ((1, 4), (2, 4), (3, 4))
P_SIZES = ((1, 3), (500, 3), (1000, 3))


@pytest.mark.parametrize(
    ("specs", "batch", "axes", "shapes"),
    [
        ("ids:int64[N,T]", "1,8,32", "T", [((1, 1), (8, 16), (32, 64))]),
        ("x:float32[N,3,H,9]", "2", "H", [((2, 3, 224, 9), (2, 3, 224, 9), (2, 3, 448, 9))]),
        # axis 0 is the batch whatever its name, also where it is elsewhere in another input
        ("x:float32[b,4] m:bool[4,b]", "1,2,3", "", [ROWS, ((4, 1), (4, 2), (4, 3))]),
        ("p:float32[P,3] x:float32[N,4]", "1,2,3", "P", [P_SIZES, ROWS]),
        ("s:float32[]", "1", "", [((), (), ())]),
        *(("x:float32[4,3]", batch, "", [((4, 3),) * 3]) for batch in "14"),
        ("p:float32[P,3]", "1", "P", [P_SIZES]),
    ],
)
def test_the_batch_and_named_axes_become_three_shapes(
    specs: str, batch: str, axes: str, shapes: list[object]
) -> None:
    inputs = [parse_spec(spec) for spec in specs.split()]
    found = ranges(inputs, parse_batch(batch), {name: AXES[name] for name in axes})
    assert list(found.values()) == shapes


@pytest.mark.parametrize(
    ("spec", "axes", "says", "hint"),
    [
        ("ids:int64[N,T]", {}, "input 'ids': axis 1, 'T'", "give it one: `axes` T=MIN,OPT,MAX"),
        ("x:float32[N,T,4]", {"W": BATCH}, "no input has a dynamic axis 'W'", "dynamic axes: T"),
        ("x:float32[N,4]", {"N": BATCH}, "`axes`: N is the batch", "write it as `batch` 1,8,32"),
        ("x:float32[4,3]", {}, "no input has a dynamic batch", "`batch` 4"),
        ("p:float32[P,3]", {"P": AXES["P"]}, "`batch` 1,8,32: no input has a dynamic", "leave"),
    ],
)
def test_sizes_that_fit_no_input_are_refused(
    spec: str, axes: dict[str, AxisRange], says: str, hint: str
) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        ranges([parse_spec(spec)], BATCH, axes)
    assert hint in str(caught.value.hint)


# memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("profile", "free", "fits"),
    [
        ("l4", None, 200),
        ("l4", 170, 70),  # the workspace gives way before a build is refused
        ("l4", 160, r"m\.onnx: building needs 100 MiB .* 64 MiB of workspace, .* 160 MiB are free"),
        ("jetson-orin-nano-8gb", 4 * 1024, 200),  # three copies of the weights and the builder
        ("jetson-orin-nano-8gb", 1000, "MiB of GPU memory for the builder"),
    ],
)
def test_the_workspace_fits_into_the_free_memory(
    tmp_path: Path, profile: str, free: int | None, fits: int | str
) -> None:
    """External weights count."""
    path = tmp_path / "m.onnx"
    onnx.save_model(linear(), path, save_as_external_data=True, size_threshold=0, location="w.bin")
    os.truncate(tmp_path / "w.bin", 100 * MIB)
    target = replace(load_profile(profile), workspace_bytes=200 * MIB)
    given = replace(options(profile=target), free_bytes=free and free * MIB)
    refused = pytest.raises(Unsupported, match=str(fits))
    with refused if isinstance(fits, str) else nullcontext():
        assert round((workspace_that_fits(path, given) or 0) / MIB) == fits


# progress


def test_an_error_in_on_progress_stops_the_build(rig: Rig) -> None:
    """As where the process that asked for it has ended."""
    rig.use()

    def fails(text: str, share: float) -> None:
        if text == "Building engine":
            raise BrokenPipeError

    with pytest.raises(Unsupported):
        rig.build(on_progress=fails)
    assert not rig.out.exists()


def test_progress_from_several_threads_never_falls_and_comes_one_call_at_a_time() -> None:
    """IProgressMonitor: "must be thread-safe", as several internal threads may call it."""
    shares: list[float] = []
    busy = threading.Lock()

    def on_progress(phase: str, share: float) -> None:
        assert busy.acquire(blocking=False)
        time.sleep(0)  # lets another thread in, where one is
        shares.append(share)
        busy.release()

    progress = monitor(FakeTensorRt(), on_progress)
    progress.phase_start("build", None, 4)

    def work(number: int) -> None:
        for step in range(50):
            progress.phase_start(f"{number}.{step}", "build", 2)
            assert progress.step_complete(f"{number}.{step}", 1)
            progress.phase_finish(f"{number}.{step}")

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(work, range(4)))) == 4
    assert len(shares) == 401
    assert shares == sorted(shares)


# a Jetson's DLA

ON_DLA = Layer("{ForeignNode[gemm...relu]}", "DLA", None)
ON_GPU = Layer("{ForeignNode[a...b]}", "Myelin", None)
COPY = Layer("x to nvm", "Reformat", None)


@pytest.mark.parametrize(
    ("version", "typing"),
    [("10.3.0", ("GPU_FALLBACK",)), ("11.4.1", ("STRONGLY_TYPED", "GPU_FALLBACK"))],
)
def test_the_dla_core_is_set(
    rig: Rig, tmp_path: Path, version: str, typing: tuple[str, ...]
) -> None:
    """Before TensorRT 11 precision is a flag; FLOAT alone, as here, needs none."""
    half = save(to_half(linear(), "fp16", {})[0], tmp_path / "m.onnx")
    does = rig.use(version=version, dla_cores=2)
    facts = rig.build(half, **DLA)
    config = does.seen["config"]
    assert (config.default_device_type, config.DLA_core) == ("DLA", 1)
    assert facts.flags_used == typing
    assert facts.built_on["dla"] == "1"
    rig.use(dla_cores=0)
    found = check(half, options(**DLA | {"dla": 0}))
    assert found.accepted
    assert "checked for the GPU alone" in found.notes[0]


def test_layers_on_the_dla_are_counted_and_an_engine_without_one_is_refused() -> None:
    (note,) = note_dla((COPY, ON_DLA, ON_GPU), 1, "m.trt")
    assert note == "1 of 3 layers run on DLA core 1, the others on the GPU"
    assert "not known" in note_dla(None, 1, "m.trt")[0]
    assert note_dla((COPY,), None, "m.trt") == ()
    with pytest.raises(Unsupported, match=r"m\.trt: none of its 2 layers runs on DLA core 1"):
        note_dla((COPY, ON_GPU), 1, "m.trt")


# the timing cache


def test_the_timing_cache_is_kept_and_given_back(rig: Rig) -> None:
    file = rig.out.with_name("t.cache")
    file.touch()  # empty: a cache without timings
    does = rig.use()
    first = rig.build(timing_cache=file)
    assert file.read_bytes() == b"timed"
    assert first.built_on["timing_cache_sha256"] == hashlib.sha256(b"timed").hexdigest()
    assert not any("t.cache" in note for note in first.notes)
    second = rig.build(timing_cache=file)
    assert does.seen["caches"] == [b"", b"timed"]
    assert second.built_on["timing_cache_sha256"] == hashlib.sha256(b"timedtimed").hexdigest()
    check(rig.model, options(timing_cache=rig.out.with_name("other.cache")))
    assert not rig.out.with_name("other.cache").exists()  # a check keeps nothing


@pytest.mark.parametrize("refused", ["create", "set"])
def test_a_timing_cache_that_tensorrt_refuses_is_replaced_and_no_other_file(
    rig: Rig, refused: str
) -> None:
    """A device keeps one next to its engines, also after an update of TensorRT."""
    rig.use(cache_refused=refused)
    file, other = rig.out.with_name("timing.cache"), rig.out.with_name("notes.txt")
    file.write_bytes(b"what is in it")
    other.write_bytes(b"what is in it")
    facts = rig.build(timing_cache=file)
    assert file.read_bytes() == b"timed"
    assert "timing_cache_read_sha256" not in facts.built_on
    assert any("refused the timing cache" in note for note in facts.notes)
    with pytest.raises(BadInput, match=r"notes\.txt: is not a timing cache"):
        rig.build(timing_cache=other)
    assert other.read_bytes() == b"what is in it"


def test_a_timing_cache_that_cannot_be_written_fails_no_build(rig: Rig) -> None:
    rig.use()
    notes = rig.build(timing_cache=rig.model / "t.cache").notes
    assert "timing cache was not written" in notes[-1]


def test_caches_are_kept_apart_by_tensorrt_gpu_and_driver(cache: Path) -> None:
    gpu = Gpu("NVIDIA L4", 1, "580.65.06", "8.9")
    here = replace(this_machine(), gpus=(gpu,), power_mode=None)
    other = replace(here, gpus=(replace(gpu, driver="575.1"),))
    jetson = replace(here, gpus=(), board="Jetson Orin NX", l4t="36.4.3", power_mode="25W")
    names = ["NVIDIA-L4_580.65.06", "NVIDIA-L4_575.1", "Jetson-Orin-NX_36.4.3_25W"]
    assert [cache_path("10.3", each) for each in (here, other, jetson)] == [
        cache / "timing" / f"10.3_{name}.cache" for name in names
    ]
    assert cache_path("10.3", replace(here, gpus=(), board=None)) is None


# what NVIDIA's parser and builder answer, as our messages; the log lines come from real runs


NO_DRIVER = "[x.cpp::f::1] Error Code 1: Cuda Runtime (In f at x.cpp:2 (cudaError 35: no driver))"
CANNOT = (
    "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (Network must have at least "
    "one output In validate at /_src/optimizer/api/network.cpp:4023)"
)
PLUGIN = "NonZero plugin creator version 1 was not found in plugin registry."
TYPES = "IConvolutionLayer input and kernel must be of same type. input type is BFloat16 but "
FLOAT = "Assertion failed: (x->getType() == DataType::kFLOAT): Only FLOAT input is supported."
UNKNOWN = "UNSUPPORTED_NODE"


@pytest.mark.parametrize(
    ("code", "operator", "name", "desc", "says"),
    [
        (UNKNOWN, "Det", "det", "false", "operator Det 'det' is not supported by TensorRT"),
        (UNKNOWN, "Det", "", "false", "operator Det '#7' is not supported by TensorRT"),
        (UNKNOWN, "Elu", "n0", FLOAT, "by TensorRT: Only FLOAT input is supported"),
        (
            UNKNOWN,
            "NonZero",
            "nz",
            f"Assertion failed: creator: {PLUGIN}",
            "by TensorRT: creator: NonZ",
        ),
        (
            "INVALID_NODE",
            "Conv",
            "c",
            TYPES + "kernel is of type Float.",
            "Conv 'c': IConvolutionLayer input",
        ),
        ("INVALID_GRAPH", "", "", "Failed to import initializer: In node -1", "Failed to import"),
    ],
)
def test_the_parsers_own_reason_is_shown(
    code: str, operator: str, name: str, desc: str, says: str
) -> None:
    """The operator may be supported, and its type not."""
    values = {"code": f"E.{code}", "node_operator": operator, "node_name": name, "node": 7}
    error = SimpleNamespace(**{key: partial(str, each) for key, each in values.items()})
    error.desc = lambda: desc
    parser: Any = SimpleNamespace(num_errors=1, get_error=lambda _number: error)
    (found,) = parser_reasons(parser, LogLines())
    assert says in found.message
    assert isinstance(found, BadInput) == code.startswith("INVALID")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([NO_DRIVER, CANNOT], "Network must have at least one output"),  # the driver is not it
        ([NO_DRIVER], "no NVIDIA driver on this machine"),
        ([], "no reason"),
        (["Tactic Selection: no tactics to implement within workspace limit."], "workspace"),
        (["Unable to load library: libnvinfer_lean.so.1: cannot open"], "libnvinfer_lean"),
        (["Requested amount of GPU memory (5 bytes) could not be allocated"], "GPU memory"),
        (["Compute capability is invalid or not supported"], "Compute capability"),
    ],
)
def test_a_failed_build_has_an_explanation(lines: list[str], words: str) -> None:
    assert words in build_refusal(lines).message
    assert "network.cpp" not in build_refusal(lines).message


def test_every_refusal_is_in_the_one_line() -> None:
    error = error_of("m.onnx", [Unsupported("no Det", hint="hint"), Unsupported("no Unique")])
    assert isinstance(error, Unsupported)
    assert (error.message, error.hint) == ("m.onnx: no Det; no Unique", "hint")
    assert isinstance(error_of("m.onnx", [BadInput("cut")]), BadInput)
