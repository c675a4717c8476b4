"""`build` for TensorRT: what is proven of an engine, and what is said where nothing can be.

A TensorRT made of Python takes the builder's place: no machine here has a GPU.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import deploykit as dk
from deploykit.building.builder import BuildJob, BuildResult, Shapes
from deploykit.building.prove import check_here, prove_plan
from deploykit.building.tensorrt import build_engine, check_build
from deploykit.core.artefact import Artefact
from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported
from deploykit.core.files import sha256
from deploykit.core.machine import Gpu, this_machine
from deploykit.core.profile import load_profile
from deploykit.core.subprocesses import run_apart
from deploykit.engines.tensorrt.compatibility import Here, rebuild
from deploykit.quantization.job import QuantizeRequest
from tests.support.onnx_zoo import make, save
from tests.support.runtimes import fake_tensorrt as fake
from tests.support.runtimes.fake_tensorrt import Behaviour, FakeTensorRt, Rig, replaced
from tests.support.runtimes.gpu_machine import LAYER, LAYERS, gpu_machine, plan

ENDS = ("Inputs", "Outputs")
ORIN = "jetson-orin-nano-8gb"


def layers(*kinds: str, **more: Any) -> str:
    """A layer of each of the file's nodes that computes in `kinds`, as the inspector reports it."""
    named = zip(("Mul_0", "Add_1"), kinds, strict=False)
    items = [
        {**LAYER, "Name": name, **{end: [{"Name": "t", "Format/Datatype": kind}] for end in ENDS}}
        for name, kind in named
    ]
    items[-1] |= more
    return json.dumps({"Layers": items})


def built(
    model: Path, folder: Path, shapes: Shapes | None = None, dla: int | None = None, **gate: Any
) -> Any:
    """Build for a target that this machine is not. `dla`: what is asked for after the build."""
    stage, l4 = folder / "stage", load_profile("l4")
    stage.mkdir()
    request = QuantizeRequest(to="fp32", runtime="tensorrt", target=l4, **gate)
    source = Artefact.open(model)
    job = BuildJob(source, l4, request, shapes or Shapes(), stage / "m.trt", folder / "m.trt")
    plan = build_engine(source, job.tmp, l4, job.shapes, None)
    return prove_plan(plan, source, replace(job, shapes=replace(job.shapes, dla=dla)))


GEMM = LAYERS.replace("node_of_m + node_of_y", "gemm")


def test_an_engine_that_cannot_run_here_is_kept_as_unverified(rig: Rig, tmp_path: Path) -> None:
    rig.use(layers=GEMM)
    made = built(rig.model, tmp_path, Shapes(batch="2,4,64"))
    assert made.path.read_bytes()[1:4] == b"trt"
    manifest = Artefact(made.path).manifest
    assert manifest is not None
    assert (manifest.format, manifest.precision) == ("tensorrt", {"float32": 1})
    assert manifest.evidence.verified is False
    assert (manifest.built_on["profile"], manifest.built_on["batch"]) == ("l4", "2,4,64")
    assert any("not verified" in note for note in made.notes)
    found = dk.inspect(made.path)
    assert (found.format, found.precision, found.fits) == ("tensorrt", {"float32": 1}, ("l4",))
    assert found.details["verified"] is False
    made.path.with_name("m.trt.json").unlink()
    with pytest.raises(dk.BadInput, match="without a manifest"):
        dk.inspect(made.path)


# on a machine with a GPU


class Machine:
    """A machine with an L4, and a model to build there; `machine(...)`: what its TensorRT does."""

    def __init__(self, model: Path, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
        self.model, self.folder, self._stack, self._patch = model, model.parent, stack, patch

    def __call__(self, **more: Any) -> Behaviour:
        return self._stack.enter_context(gpu_machine(self.folder, self._patch, **more))

    def build(self, **options: Any) -> Any:
        return dk.build(self.model, "l4", **options)


@pytest.fixture(name="machine")
def machine_fixture(affine_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with ExitStack() as stack:
        yield Machine(affine_onnx, stack, monkeypatch)


def test_the_manifest_records_the_engines_facts_and_its_source(machine: Machine) -> None:
    does = machine()
    made = machine.build(shapes=Shapes(device=1))
    assert set(does.seen["devices"]) == {1}  # build and proof
    built_on = dict(made.manifest.built_on)
    timings = built_on.pop("timing_cache_sha256")
    assert built_on == {
        "tensorrt": "10.13.3.9",
        "driver": "580.65.06",
        "gpu": "NVIDIA L4",
        "compute_capability": "8.9",
        "sm_count": "58",
        "flavour": "tensorrt",
        "profile": "l4",
        "batch": "1,8,32",
        "workspace_bytes": str(6 << 30),
        "typing": "strong",
        "architecture": platform.machine(),
        "model": "affine.onnx",
        "onnx_sha256": sha256(machine.model),
        "precision": "fp32",
    }
    assert made.manifest.made_from == (sha256(machine.model),)
    assert made.manifest.evidence.parity is not None
    assert made.manifest.evidence.golden.file == "affine.trt.golden.npz"
    assert (machine.folder / "affine.trt.golden.npz").exists()
    second = machine.build(shapes=Shapes(device=1), force=True).manifest.built_on
    assert second["timing_cache_read_sha256"] == timings


def test_the_precision_is_in_the_manifest_and_in_the_rebuild_command(machine: Machine) -> None:
    """Types are read at the usual sizes: without, TensorRT tells none of a dynamic engine."""
    machine(content=plan(layers=layers("Half", "Half")))
    made = machine.build(precision="fp16")
    manifest = made.manifest
    assert (manifest.precision, made.evidence.precision.seen) == ({"float16": 2}, 1.0)
    assert manifest.built_on["precision"] == "fp16"
    assert manifest.built_on["model"] == "affine.onnx"
    assert manifest.made_from == (sha256(machine.model), manifest.built_on["onnx_sha256"])
    assert manifest.evidence.source_graph.quantize.to == "fp16"
    assert manifest.evidence.source_graph.accuracy.passed is True
    here = Here("10.13.3.9", "NVIDIA L4", "8.9", 58, "580.65.06", "13.0")
    assert rebuild(made.path, manifest, here) == (
        f"deploykit build affine.onnx --profile l4 --precision fp16 --batch 1,8,32 -o {made.path}"
    )


def test_the_share_of_time_in_each_precision_is_measured(machine: Machine) -> None:
    machine(content=plan(layers=layers("Float", "Half", ms=3.0)))
    read = machine.build().evidence.precision
    assert read.shares == {"float16": 0.5, "float32": 0.5}
    assert read.time_shares == {"float16": 0.75, "float32": 0.25}


def test_an_engine_of_unknown_types_is_not_verified(machine: Machine) -> None:
    machine(content=plan(layers=layers(*["N/A due to dynamic shapes"] * 2)))
    made = machine.build(precision="fp16")
    assert made.manifest.precision == {"float16": 2}  # as the graph has it
    assert made.manifest.evidence.verified is False
    assert made.notes[-1] == ("not verified: it is not known what 100.0% of the operations run in")


def test_an_engine_with_too_many_wider_layers_is_rejected(machine: Machine) -> None:
    machine(content=plan(layers=layers("Float", "Half")))
    with pytest.raises(dk.GateFailed, match="'Mul_0' was requested in float16") as caught:
        machine.build(precision="fp16")
    assert caught.value.result.path.name == "affine.rejected.trt"
    assert caught.value.result.manifest.evidence.precision.wider
    assert not machine.model.with_suffix(".trt").exists()


@pytest.mark.parametrize(
    ("batch", "given", "batches"),
    [
        ((4, 8, 16), False, [4, 7, 16]),
        ((1, 8, 32), True, [1, 2, 9]),
        ((4, 8, 8), True, [4, 5, 8]),
        ((9, 9, 9), True, [9]),
    ],
)
def test_the_proof_and_the_golden_samples_fit_the_engine_and_the_data_that_were_given(
    machine: Machine, batch: tuple[int, ...], given: bool, batches: list[int]
) -> None:
    x = np.random.default_rng(3).standard_normal((9, 4)).astype(np.float32)
    np.savez(data := machine.folder / "real.npz", x=x)
    machine(content=plan(batch, layers=LAYERS))
    sizes = Shapes(batch=",".join(map(str, batch)))
    made = machine.build(data=data if given else None, shapes=sizes)
    assert made.parity is not None
    assert [row.batch for row in made.parity.rows] == batches
    assert made.manifest.evidence.verified is True
    recorded = np.load(made.path.with_name(made.manifest.evidence.golden.file))["inputs/x"]
    assert (recorded == x[: len(recorded)]).all() or not given


def test_data_of_other_sizes_than_the_engine_takes_are_refused_before_the_build(
    machine: Machine,
) -> None:
    np.savez(machine.folder / "real.npz", x=np.zeros((9, 4), np.float32))
    does = machine()
    with pytest.raises(dk.BadInput, match="axis N of 'x' has 9, the engine is built for 16 to 16"):
        machine.build(data=machine.folder / "real.npz", shapes=Shapes(batch="16"))
    assert "config" not in does.seen


def test_an_engine_with_no_layer_on_the_dla_is_not_kept(machine: Machine) -> None:
    machine()
    with pytest.raises(dk.Unsupported, match=r"m\.trt: none of its 1 layers runs on DLA core 0"):
        built(machine.model, machine.folder, dla=0)
    assert not (machine.folder / "m.trt").exists()


def test_an_engine_whose_outputs_differ_is_rejected(machine: Machine) -> None:
    machine(content=plan(layers=LAYERS, off=1.0))
    words = r"against affine\.onnx: output 'y' at batch \d+: error"
    with pytest.raises(dk.GateFailed, match=words) as caught:
        machine.build()
    assert caught.value.result.path.name == "affine.rejected.trt"
    assert not machine.model.with_suffix(".trt").exists()
    kept = Artefact(caught.value.result.path).manifest
    assert kept is not None
    assert kept.evidence.verified is False
    assert kept.evidence.golden.file == "affine.rejected.trt.golden.npz"


@pytest.mark.parametrize(("off", "passes"), [(0.0, True), (0.009, False)])
def test_the_engines_accuracy_is_gated_on_labelled_data(
    machine: Machine, off: float, passes: bool
) -> None:
    """Rows whose first value leads by less than `off` get another answer."""
    machine(content=plan(layers=LAYERS, off=[0.0, off, 0.0, 0.0]))
    x = np.zeros((400, 4), np.float32)
    x[:, 0] = 0.001
    data = machine.folder / "test.npz"
    np.savez(data, x=x, labels=np.zeros(400, np.int64))
    build = functools.partial(built, machine.model, machine.folder, data=data, max_drop=0.02)
    if passes:
        assert build().manifest.evidence.accuracy.passed is True
    else:
        with pytest.raises(dk.GateFailed) as caught:
            build()
        assert caught.value.result.manifest.evidence.accuracy.passed is False
        assert caught.value.result.manifest.evidence.parity.passed is True


@pytest.mark.parametrize(("name", "shape"), [("other", [-1, 4]), ("x", [-1, 4, 4])])
def test_an_engine_of_other_inputs_is_refused(machine: Machine, name: str, shape: Any) -> None:
    sizes = [[n, *shape[1:]] for n in (1, 8, 32)]
    tensors = fake.tensor(name, "INPUT", shape), fake.tensor("y", "OUTPUT", shape)
    machine(content=fake.plan_bytes(tensors, [{name: sizes}], layers=LAYERS))
    with pytest.raises(dk.BadInput, match=r"affine\.onnx"):
        machine.build()


def test_the_parser_gets_a_name_for_each_axis_that_the_file_calls_unknown(machine: Machine) -> None:
    """TensorRT takes axes of one name for axes of one size."""
    does = machine()
    relu = helper.make_node("Relu", ["x"], ["y"], "relu")
    model = make([relu], {"x": ("?", "?")}, {"y": ("?", "?")}, {})
    check_build(save(model, machine.folder / "m.onnx"), "l4", shapes=Shapes(axes=["x_1=1,4,8"]))
    (parsed,) = onnx.load_from_string(does.seen["parsed"]).graph.input
    dims = parsed.type.tensor_type.shape.dim
    assert [dim.dim_param for dim in dims] == ["N", "x_1"]


@pytest.mark.parametrize("failure", [None, RuntimeError("a null pointer"), TypeError("factory")])
@pytest.mark.parametrize(
    ("owner", "member", "stops"),
    [
        ("_Builder", "create_network", True),
        ("_Builder", "create_builder_config", True),
        ("_Builder", "create_optimization_profile", True),
        ("_Builder", "build_serialized_network", True),
        ("_Parser", "parse_from_file", True),
        ("_Config", "create_timing_cache", False),
        ("_Config", "get_timing_cache", False),
        ("_Cache", "serialize", False),
        ("Engine", "create_engine_inspector", False),
        ("Engine", "get_tensor_profile_shape", False),
        ("Inspector", "get_engine_information", False),
        ("Context", "infer_shapes", False),
        ("Context", "execute_async_v3", False),
    ],
)
def test_a_member_that_fails_as_nvidias_bindings_fail_is_a_refusal(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    member: str,
    stops: bool,
    failure: Exception | None,
) -> None:
    """They return None, or raise for a null pointer (TypeError) or a failed call (RuntimeError)."""

    def fails(*_: Any) -> None:
        if failure is not None:
            raise failure

    machine()
    monkeypatch.setattr(getattr(fake, owner), member, fails)
    if stops:
        with pytest.raises(dk.Unsupported, match=r"affine\.onnx: "):
            machine.build()
    else:
        assert machine.build().path.exists()


def test_an_engine_replaces_no_plugin_that_it_needs(machine: Machine) -> None:
    machine()
    library = machine.folder / "affine.engine"
    library.write_bytes(b"code")
    with pytest.raises(dk.BadInput, match="is an input of this command"):
        machine.build(out=library, force=True, shapes=Shapes(plugins=[library]))


def test_the_workspace_fits_the_free_memory_of_a_shared_gpu(machine: Machine) -> None:
    does = machine()
    does.seen["cuda"].total_bytes = 200 << 20
    made = machine.build()
    assert 64 << 20 < does.seen["WORKSPACE"] < 200 << 20
    assert any("MiB instead of 6,144 MiB, as free memory is short" in note for note in made.notes)


# which target this machine is


TWO = {
    "gpus": (
        Gpu("NVIDIA L4", 1, "580", "8.9"),
        Gpu("NVIDIA A100-SXM4-80GB", 1, "580", "8.0"),
    )
}
NANO = {"gpus": (), "board_ids": ("nvidia,p3767-0005", "nvidia,tegra234"), "l4t": "36.4.3"}
WITH_SMI = NANO | {"gpus": (Gpu("Orin (nvgpu)", None, "540.4.0", "8.7"),), "l4t": None}


@pytest.mark.parametrize(
    ("machine_is", "number", "right", "wrong"),
    [
        (TWO, 0, "l4", "a100-80gb"),
        (TWO, 1, "a100-80gb", "l4"),
        (NANO, 0, ORIN, "jetson-orin-nx-16gb"),  # by its board, not by the name of its GPU
        (WITH_SMI, 0, ORIN, "jetson-orin-nx-16gb"),
    ],
)
def test_the_gpu_or_board_that_was_chosen_must_be_the_target(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    machine_is: dict[str, Any],
    number: int,
    right: str,
    wrong: str,
) -> None:
    here = replace(this_machine(), **machine_is)
    monkeypatch.setattr("deploykit.building.prove.this_machine", lambda: here)
    with replaced("tensorrt", FakeTensorRt()):
        check_here(load_profile(right), Artefact(rig.model), number)
        with pytest.raises(dk.Unsupported, match=f"'{wrong}' is not this machine"):
            check_here(load_profile(wrong), Artefact(rig.model), number)


def test_a_target_of_another_machine_is_refused_with_what_works_here(rig: Rig) -> None:
    if this_machine().gpus:
        pytest.skip("a GPU is here")
    with pytest.raises(dk.Unsupported, match="profile 'h200' is not this machine") as caught:
        dk.build(rig.model, "h200")
    assert "--check" in caught.value.hint
    assert "--profile cpu" in caught.value.hint


def test_a_target_without_tensorrt_has_no_such_options_and_nothing_to_check(rig: Rig) -> None:
    with pytest.raises(dk.BadInput, match="has no such options") as caught:
        dk.build(rig.model, "cpu", shapes=Shapes(batch="1,2,3", tf32=False, dla=0))
    assert caught.value.hint == "leave out `dla`, `tf32`, for TensorRT only"
    with pytest.raises(dk.BadInput, match="nothing to check"):
        check_build(rig.model, "cpu")


def test_a_refused_check_fails_and_names_the_reason(rig: Rig) -> None:
    rig.use(strong_error="Error Code 10: no implementation for node gemm")
    checked = check_build(rig.model, "l4")
    assert not checked.accepted
    with pytest.raises(dk.GateFailed, match=r"m\.onnx: refused: "):
        checked.raise_if_refused()


# in a process of its own, as on boards where CPU and GPU share memory

CHILD = """
import sys
from tests.support.runtimes.fake_tensorrt import Behaviour, FakeTensorRt
sys.modules["tensorrt"] = FakeTensorRt(
    does=Behaviour(version="10.3.0", strong_error={error!r}, weak_error={error!r})
)
sys.modules["cuda"] = None
from deploykit.core.subprocesses import main
main()
"""
AND_ENDS = "import time; time.sleep(0.3); open('ended', 'w')"


def build_apart(
    rig: Rig, patch: pytest.MonkeyPatch, code: str, on_progress: Any = None
) -> BuildResult:
    """Build in a process that runs this code, in the test's folder."""
    command = [sys.executable, "-c", code]
    patch.setattr("deploykit.building.tensorrt.run_apart", run_apart)
    patch.setattr(
        "deploykit.core.subprocesses.module_command", lambda _, number: [*command, number]
    )
    patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    patch.chdir(rig.out.parent)
    source = Artefact.open(rig.model)
    return build_engine(source, rig.out, load_profile(ORIN), Shapes(), on_progress)


def test_a_shared_memory_builds_in_another_process_and_reports_progress(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []
    code = CHILD.format(error=None)
    built = build_apart(rig, monkeypatch, code, lambda phase, _share: phases.append(phase))
    assert "tensorrt" not in sys.modules
    assert rig.out.exists()
    assert built.built_on["tensorrt"] == "10.3.0"
    assert {"parsing", "Building engine", "built"} <= set(phases)


WORKSPACE = CHILD.format(error="no tactics within workspace limit")


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (WORKSPACE + AND_ENDS, Unsupported, "no tactics within workspace limit"),
        ("import os; os.kill(os.getpid(), 9)", OutOfMemory, "the system ended it"),
        ("import os; os.kill(os.getpid(), 11)", DeploykitError, "ended with code -11"),
    ],
)
def test_an_error_there_is_the_error_here_and_nothing_is_interrupted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, code: str, error: type, says: str
) -> None:
    """An interrupt then is a traceback among the messages of a device."""
    with pytest.raises(error, match=says) as caught:
        build_apart(rig, monkeypatch, code)
    assert type(caught.value) is error
    assert not rig.out.exists()
    assert Path("ended").exists() is (error is Unsupported)
    if error is Unsupported:
        assert caught.value.hint == "a larger `workspace_bytes` in the profile"


STOPPED = """
import signal, sys, time
from multiprocessing.connection import Connection
try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    pipe = Connection(int(sys.argv[1]))
    pipe.send(("progress", "x", 0.1))
    time.sleep(60)
except KeyboardInterrupt:
    open("stopped", "w").close()
"""


def test_an_interrupted_caller_stops_the_build(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(phase: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_apart(rig, monkeypatch, STOPPED, stop)
    assert Path("stopped").exists()
