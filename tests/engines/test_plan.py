"""What may be loaded: each way in which a plan is wrong, and whose code it may bring along."""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.cli.main import main
from deploykit.core.artefact import Artefact, Manifest, write_manifest
from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported
from deploykit.core.evidence import BuildRecord, Evidence, WeightsFile
from deploykit.core.files import manifest_path, sha256
from deploykit.core.tensors import TensorSpec
from deploykit.engines.tensorrt.compatibility import (
    Here,
    built_here,
    check_plan,
    differences,
    list_path,
    load_plugins,
    open_plan,
    rebuild,
    record_build,
    recorded_plugins,
)
from tests.support.installed import compiled
from tests.support.onnx_zoo import linear
from tests.support.runtimes.fake_tensorrt import Behaviour, FakeTensorRt
from tests.support.runtimes.gpu_machine import gpu_machine

HERE = Here("10.13.3.9", "NVIDIA H200", "9.0", 132, "580.65.06", "13.0")
CONTENT = b"ptrt" + bytes(range(256)) * 40
BUILT = {"cuda": "13", "model": "resnet.onnx", "profile": "h200", "batch": "1,8,32"}
BUILT = {**HERE.facts(), **BUILT}


def described(
    content: bytes = CONTENT,
    version_compatible: bool = False,
    plugins: dict[str, str] | None = None,
    **built: str,
) -> Manifest:
    return Manifest(
        format="tensorrt",
        inputs=(TensorSpec("x", "float32", ("N", 4)),),
        outputs=(TensorSpec("y", "float32", ("N", 4)),),
        precision={"float16": 20, "float32": 3},
        sha256=hashlib.sha256(content).hexdigest(),
        made_from=("ab" * 32,),
        built_on={**BUILT, **built},
        evidence=Evidence(build=BuildRecord("h200", (), version_compatible, plugins or {})),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan and its manifest, both valid."""
    monkeypatch.chdir(tmp_path)
    path = Path("m.trt")
    path.write_bytes(CONTENT)
    write_manifest(path, described())
    return path


def test_plan_of_this_machine_is_read_whole_and_its_manifest_once(plan: Path) -> None:
    artefact = Artefact.open(plan)
    assert artefact.manifest == described()
    manifest_path(plan).unlink()  # reading it again would hash gigabytes again
    opened = open_plan(artefact, HERE)
    assert (opened.content, opened.manifest, opened.notes) == (CONTENT, described(), ())


# damaged, another file, no manifest or one of something else


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: b"", "the file is empty"),
        (lambda c: c[:5000] + bytes([c[5000] ^ 1]) + c[5001:], "SHA-256 differs"),
        (lambda _: b"vtrt" + bytes(1000), "TensorRT for RTX"),
        (lambda _: linear().SerializeToString(), "is an ONNX file, a TensorRT engine is needed"),
    ],
    ids=["empty", "bit", "rtx", "onnx"],
)
def test_damaged_plan_is_refused_trusted_or_not(
    plan: Path, change: Callable[[bytes], bytes], says: str
) -> None:
    plan.write_bytes(change(CONTENT))
    for trust in (False, True):
        with pytest.raises((BadInput, Unsupported), match=says) as caught:
            open_plan(plan, HERE, trust)
        assert caught.value.exit_code == (3 if "RTX" in says else 2)


@pytest.mark.parametrize(
    "other",
    [{"sha256": ""}, {"format": "onnx"}, {"evidence": Evidence(weights=WeightsFile("../x", "00"))}],
)
def test_manifest_of_something_else_is_refused(plan: Path, other: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="SHA-256 differs"):
        check_plan(plan, described(b"another"), HERE)
    with pytest.raises(BadInput, match=r"m\.trt\.json does not describe an engine"):
        check_plan(plan, replace(described(), **other), HERE)


def test_a_hostile_manifest_gives_one_short_line_of_printable_characters(plan: Path) -> None:
    odd = {"tensorrt": "x.y", "compute_capability": "ninety", "cuda": "-1", "driver": "\x1b[2J"}
    for built in (odd, {"gpu": "\x1b[2J\nH100" + "x" * 500}):
        with pytest.raises(DeploykitError) as caught:
            check_plan(plan, described(**built), HERE)
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 300


# another TensorRT, GPU, driver or CPU: (built on, here, what differs; "" if it fits)

OLD_DRIVER = replace(HERE, driver="550.54.14", cuda="12.4")
A10 = {"gpu": "NVIDIA A10", "compute_capability": "8.6", "sm_count": "72"}
CUDA_12, CUDA_13 = (replace(HERE, tensorrt_cuda=each).facts() for each in ("12", "13"))
X86, ARM = (replace(HERE, architecture=each) for each in ("x86_64", "aarch64"))


@pytest.mark.parametrize(
    ("built", "here", "says"),
    [
        ({"tensorrt": "10.3.0.26"}, HERE, "TensorRT 10.13.3.9 here, 10.3.0.26 there"),
        ({"compute_capability": "8.7", "gpu": "Orin"}, HERE, r"9.0 here \(NVIDIA H200\), 8.7 "),
        ({"gpu": "NVIDIA H100 80GB HBM3"}, HERE, "NVIDIA H200 here, NVIDIA H100 80GB HBM3 there"),
        ({"sm_count": "16"}, HERE, "132 multiprocessors in use here, 16 there"),
        ({"cuda": "14.1"}, HERE, "driver 580.65.06 runs CUDA 13.0, the engine needs CUDA 14"),
        ({}, OLD_DRIVER, r"driver 550.54.14 runs CUDA 12.4.*driver 580 or later"),
        ({"tensorrt": "10.3.0", "cuda": "14.0"}, HERE, r"TensorRT .*; the driver"),
        *(({"tensorrt": version}, HERE, "") for version in ("10.13.3", "10.13")),
        ({}, replace(HERE, driver="610.10", cuda="13.4"), ""),
        (CUDA_12, replace(OLD_DRIVER, tensorrt_cuda="12"), ""),  # the CUDA of its TensorRT
        ({"cuda": ""}, OLD_DRIVER, ""),  # not known: TensorRT decides
        (CUDA_13, replace(OLD_DRIVER, tensorrt_cuda="12"), "needs CUDA 13: driver 580"),
        (X86.facts(), X86, ""),
        (X86.facts(), ARM, "aarch64 here, x86_64 there"),
        *(
            ({**A10, "hardware_compatible": level}, replace(HERE, compute_capability=here), says)
            for level, here, says in [
                *(("ampere-plus", each, "") for each in ("8.0", "12.0")),
                ("ampere-plus", "7.5", "7.5, the engine needs 8.0"),
                ("same-compute-capability", "8.6", ""),
                *((level, "8.9", "8.9 here") for level in ("same-compute-capability", "none", "")),
                *((level, "8.6", "H200 here, NVIDIA A10 there") for level in ("none", "")),
            ]
        ),
    ],
)
def test_plan_of_another_machine_says_what_differs(
    built: dict[str, str], here: Here, says: str
) -> None:
    found = "; ".join(differences({**BUILT, **built}, here))
    assert (re.search(says, found) is not None) if says else found == ""


@pytest.mark.parametrize(
    ("there", "here", "fits"),
    [
        ("10.3.0", "10.13.3.9", True),
        *((n, "10.13.3.9", False) for n in ("10.16.0", "11.0.0", "9.3")),
        *((n, "11.4.1", n == "10.3.0") for n in ("10.3.0", "9.3", "12.0")),
    ],
)
def test_version_compatible_plan_runs_on_later_minors_and_from_10_on_11(
    there: str, here: str, fits: bool
) -> None:
    machine, built = replace(HERE, tensorrt=here), {**BUILT, "tensorrt": there}
    assert (list(differences(built, machine, version_compatible=True)) == []) is fits
    assert list(differences(built, machine)) != []


@pytest.mark.parametrize(
    ("built", "here", "words"),
    [
        (BUILT, replace(HERE, driver="580.20.01"), "driver 580.65.06; the older 580.20.01"),
        ({"profile": "h200"}, HERE, "tensorrt and gpu and compute_capability"),
    ],
)
def test_what_cannot_be_compared_is_a_note(
    plan: Path, built: dict[str, str], here: Here, words: str
) -> None:
    (note,) = check_plan(plan, replace(described(), built_on=built), here).notes
    assert words in note


# the command in the hint, which builds it again

QUANTIZED = ("ab" * 32, "cd" * 32)  # made from a model and from samples


@pytest.mark.parametrize(
    ("built", "made_from", "words"),
    [
        ({"gpu": "Orin", "compute_capability": "8.7"}, (), "resnet.onnx --profile auto --batch"),
        ({"precision": "fp16"}, QUANTIZED, "h200 --precision fp16 --batch 1,8,32 -o m.trt"),
        (
            {"precision": "int8", "calib": "a/c"},
            QUANTIZED,
            "int8 --batch 1,8,32 -o m.trt --calib c",
        ),
        ({"precision": "fp8"}, QUANTIZED, "fp8 --batch 1,8,32 -o m.trt --calib DATA"),
        ({"precision": "int8"}, (), "resnet.onnx --profile h200 --batch 1,8,32 -o m.trt"),
        ({"axes": "T=1,2,3 W=8"}, (), "--axis T=1,2,3 --axis W=8 -o m.trt"),
        ({"model": "../../secret.onnx"}, (), "build secret.onnx --profile"),  # never a path
        (
            {"model": "a b;rm", "batch": "$(id)"},
            (),
            "build 'a b;rm' --profile h200 --batch '$(id)'",
        ),
        ({"model": ""}, (), "deploykit build MODEL.onnx --profile h200"),
    ],
)
def test_the_hint_builds_it_again(
    plan: Path, built: dict[str, Any], made_from: tuple[str, ...], words: str
) -> None:
    manifest = described(**{"tensorrt": "11.0.0", **built})
    manifest = replace(manifest, made_from=made_from or manifest.made_from)
    with pytest.raises(Unsupported) as caught:
        check_plan(plan, manifest, HERE, trust=True)
    assert (caught.value.exit_code, "\n" in caught.value.message) == (3, False)
    assert words in (caught.value.hint or "")
    assert caught.value.hint == f"build it here: {rebuild(plan, manifest, HERE)}"


# whose code an engine may bring along: only that of this user's own builds, or with `trust`

DIGEST = hashlib.sha256(CONTENT).hexdigest()
PLUGIN = "cd" * 32
CODE = described(version_compatible=True)
NEEDS_PLUGIN = described(plugins={"libown.so": PLUGIN})
REFUSED = "was not built by you on this machine"


@pytest.mark.parametrize(
    ("manifest", "recorded", "says"),
    [
        (CODE, None, "contains host code"),
        (NEEDS_PLUGIN, None, "brings plugin libraries"),
        (described(version_compatible=True, plugins={"libevil.so": PLUGIN}), CODE, "brings"),
        (NEEDS_PLUGIN, replace(NEEDS_PLUGIN, sha256="00" * 32), "brings"),
    ],
    ids=["host-code", "plugin", "a library that was added", "a stranger's plan"],
)
def test_a_manifest_does_not_vouch_for_the_code_of_its_engine(
    plan: Path, manifest: Manifest, recorded: Manifest | None, says: str
) -> None:
    assert recorded is None or record_build(recorded)
    write_manifest(plan, manifest)
    with pytest.raises(BadInput, match=f"{says}.*, and {REFUSED}") as caught:
        open_plan(plan, HERE)
    assert caught.value.exit_code == 2
    assert "`trust`" in (caught.value.hint or "")
    assert "\n" not in caught.value.message
    assert open_plan(plan, HERE, trust=True).manifest == manifest


@pytest.mark.parametrize("manifest", [CODE, NEEDS_PLUGIN], ids=["host-code", "plugin"])
def test_a_recorded_build_needs_no_trust(plan: Path, manifest: Manifest, cache: Path) -> None:
    assert [check_plan(plan, described(dla=n), HERE).dla for n in ("1", "x")] == [1, None]
    assert record_build(described())  # an engine without code needs no record
    assert not list_path().exists()
    cache.mkdir()
    list_path().touch(0o600)
    list_path().write_text("ab12", encoding="ascii")  # a line that was cut
    for each in (manifest, replace(CODE, sha256="11" * 32), manifest):
        assert record_build(each)
    assert check_plan(plan, manifest, HERE).host_code is manifest.version_compatible
    digests = {DIGEST, *manifest.plugins.values(), "11" * 32, "ab12"}
    assert sorted(list_path().read_text(encoding="ascii").split()) == sorted(digests)


def link(path: Path) -> None:
    (path.parent / "sums").write_text(f"{DIGEST}  m.trt\n", encoding="ascii")
    path.symlink_to(path.parent / "sums")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: record_build(CODE) and path.chmod(0o620),
        lambda path: record_build(CODE) and path.chmod(0o602),
        lambda path: path.write_bytes(b"\xff\xfe"),
        link,
    ],
)
def test_a_list_that_is_not_this_users_alone_proves_nothing(
    cache: Path, spoil: Callable[[Path], None]
) -> None:
    cache.mkdir()
    spoil(list_path())
    assert not built_here(CODE)
    assert not record_build(CODE)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Behaviour]:
    with gpu_machine(tmp_path, monkeypatch) as found:
        yield found


def test_build_records_an_engine_with_code_so_that_it_opens(
    affine_onnx: Path,
    gpu: Behaviour,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = dk.build(affine_onnx, "l4", shapes=Shapes(version_compatible=True))
    assert made.manifest.version_compatible
    assert made.manifest.evidence.verified
    assert list_path().stat().st_mode & 0o777 == 0o600
    dk.load(made.path).close()
    shutil.rmtree(list_path().parent)  # as on another machine
    dk.load(made.path, trust=True).close()
    words = ["deploykit", "bench", made.path, "--quick", "-o", affine_onnx.with_name("report")]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.endswith(f"contains host code, and {REFUSED}")
    assert hint.endswith("build it here, or open your own with --trust")


def test_build_without_a_place_for_the_record_notes_that_trust_is_needed(
    affine_onnx: Path, gpu: Behaviour, cache: Path
) -> None:
    cache.write_text("a file, not a folder", encoding="utf-8")
    made = dk.build(affine_onnx, "l4", shapes=Shapes(version_compatible=True))
    assert made.manifest.evidence.verified
    assert any(note.endswith("opening it needs --trust") for note in made.notes)
    plain = dk.build(affine_onnx, "l4", out=affine_onnx.with_name("plain.trt"))
    assert not any("--trust" in note for note in plain.notes)
    dk.load(plain.path).close()


# plugin libraries: found again, and loaded before the engine


def test_an_engine_built_with_a_plugin_loads_it_again_and_no_strangers(
    affine_onnx: Path, tmp_path: Path, gpu: Behaviour
) -> None:
    own = compiled(tmp_path / "libown.so", "int here(void) { return 1; }")
    made = dk.build(affine_onnx, "l4", shapes=Shapes(plugins=(own,)))
    assert made.manifest.plugins == {str(own): sha256(own)}
    dk.load(made.path).close()
    mark = tmp_path / "ran"
    evil = compiled(
        tmp_path / "libevil.so",
        "#include <stdio.h>\n"
        "__attribute__((constructor)) static void run(void)\n"
        f'{{ FILE *file = fopen("{mark}", "w"); if (file) fclose(file); }}\n',
    )
    assert made.manifest.evidence.build is not None
    for plugins, trust, error in (
        ({str(own): "0" * 64}, True, "is not the plugin library"),
        ({evil.name: sha256(evil)}, False, REFUSED),
        ({evil.name: sha256(evil)}, True, None),
    ):
        build = replace(made.manifest.evidence.build, plugins=plugins)
        evidence = replace(made.manifest.evidence, build=build)
        write_manifest(made.path, replace(made.manifest, evidence=evidence))
        assert not mark.exists()
        if error:
            with pytest.raises(BadInput, match=error):
                dk.load(made.path, trust=trust)
        else:
            dk.load(made.path, trust=trust).close()
    assert mark.exists()


def test_a_library_next_to_the_plan_comes_first_and_another_file_is_refused(tmp_path: Path) -> None:
    library, copy = tmp_path / "lib my.so", tmp_path / "sub" / "lib my.so"
    copy.parent.mkdir()
    plan = copy.parent / "m.trt"
    for path in (library, copy):
        path.write_bytes(b"code")
    recorded = {str(library): sha256(library)}
    assert recorded_plugins(plan, recorded) == [copy]
    copy.unlink()
    assert recorded_plugins(plan, recorded) == [library]
    library.write_bytes(b"other code")
    with pytest.raises(BadInput, match=r"lib my\.so: is not the plugin library that m\.trt"):
        recorded_plugins(plan, recorded)
    for name in ("gone.so", "a" * 5000, "", "a\0.so", "/"):  # some are no file's name
        with pytest.raises(NotFound, match=r"m\.trt: needs the plugin library") as caught:
            recorded_plugins(plan, {name: "0" * 64})
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("itself", [False, True])
def test_a_library_that_registers_itself_is_not_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, itself: bool
) -> None:
    """As TensorRT's own macro does when the library is loaded: a second time is an error."""
    library = compiled(tmp_path / f"lib{itself}.so", "int getCreators(void) { return 0; }")
    nv, real = FakeTensorRt(), ctypes.CDLL

    def load(path: str) -> ctypes.CDLL:
        nv.does.seen.setdefault("creators", []).extend(["own"] * itself)
        return real(path)

    monkeypatch.setattr("deploykit.engines.tensorrt.compatibility.ctypes.CDLL", load)
    load_plugins(nv, [library])
    assert nv.does.seen.get("libraries", []) == ([] if itself else [str(library)])


@pytest.mark.parametrize(("error", "reason"), [(None, "TensorRT refused it"), ("no", "no")])
def test_a_library_that_tensorrt_refuses_is_named_with_the_reason(
    tmp_path: Path, error: str | None, reason: str
) -> None:
    library = compiled(tmp_path / "libown.so", "int getCreators(void) { return 1; }")
    load = Mock(side_effect=error and RuntimeError(error), return_value=None)
    nv = FakeTensorRt()
    nv.get_plugin_registry = lambda: SimpleNamespace(load_library=load)  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match=rf"libown\.so: cannot be loaded: {reason}"):
        load_plugins(nv, [library])
