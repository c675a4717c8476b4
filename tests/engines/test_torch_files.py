"""Which PyTorch files are opened, which are refused, and that nothing in a refused one runs."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from torch.export import Dim  # noqa: E402

from deploykit.core.artefact import sniff, torch_kind  # noqa: E402
from deploykit.core.errors import BadInput  # noqa: E402
from deploykit.core.tensors import TensorSpec, parse_spec  # noqa: E402
from deploykit.engines.torch.engine import TorchEngine  # noqa: E402
from deploykit.engines.torch.files import read  # noqa: E402
from deploykit.engines.torch.loaded import Loaded  # noqa: E402
from deploykit.engines.torch.open import load_module, load_weights  # noqa: E402
from tests.support.campaign import rounds  # noqa: E402

pytestmark = pytest.mark.torch

INPUT = parse_spec("x:float32[N,4]")
OUTPUT = TensorSpec("output", "float32", ("N", 2))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.write_text, (self.marker, "ran"))


class PrivateError(Exception):
    pass


class Grenade:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (_explode, ())


def _explode() -> None:
    raise PrivateError("boom\nsecond line")


def scripted(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, its files are still about
        torch.jit.save(torch.jit.script(MODULE), path)


def exported(path: Path) -> None:
    torch.export.save(torch.export.export(MODULE, (torch.zeros(3, 4),)), path)


def with_payload(path: Path, payload: bytes) -> None:
    """Put a pickle in the place of the example inputs that every `.pt2` carries."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert any(name.endswith("sample_inputs/model.pt") for name in members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, payload if name.endswith("inputs/model.pt") else content)


MODULE = torch.nn.Linear(4, 2)
ARCH = f"{__file__}:MODULE"


SAVERS: dict[str, Callable[[Path], None]] = {
    "state_dict": lambda path: torch.save(MODULE.state_dict(), path),
    "legacy state_dict": lambda path: torch.save(
        MODULE.state_dict(), path, _use_new_zipfile_serialization=False
    ),
    "safetensors": lambda path: safetensors.save_file(MODULE.state_dict(), path),
    "torch.export": exported,
    "TorchScript": scripted,
    "pickle": lambda path: torch.save(MODULE, path),
    "legacy pickle": lambda path: torch.save(MODULE, path, _use_new_zipfile_serialization=False),
}
WHOLE = ["torch.export", "TorchScript", "pickle", "legacy pickle"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for kind, save in SAVERS.items():
        save(folder / kind)
    return folder


@pytest.mark.parametrize("kind", SAVERS)
def test_content_decides_and_every_kind_computes_the_same(saved: Path, kind: str) -> None:
    """Whole models, which are known without opening them, need permission to run their code."""
    path, whole = saved / kind, kind in WHOLE
    assert sniff(path) == ("safetensors" if kind == "safetensors" else "torch")
    inputs = [] if kind == "torch.export" else [INPUT]  # that one says so itself
    if whole:
        assert torch_kind(path) == (kind if kind in WHOLE[:2] else "pickle")
        with pytest.raises(BadInput, match=rf"{kind}: .*run .*so it was not loaded") as caught:
            load_module(path, inputs=inputs)
        assert "`allow_pickle`" in str(caught.value.hint)
    loaded = load_module(path, arch=None if whole else ARCH, inputs=inputs, allow_pickle=True)
    assert loaded.source == kind.removeprefix("legacy ")
    assert loaded.ran_pickle is whole
    torch.testing.assert_close(loaded.module(torch.ones(3, 4))[0], MODULE(torch.ones(3, 4)))
    if kind != "torch.export":
        assert loaded.outputs == (OUTPUT,)
    if kind == "pickle":
        with pytest.raises(BadInput, match="whole model, so `arch` a:b"):
            load_module(path, arch="a:b", inputs=[INPUT], allow_pickle=True)


def bombs(marker: Path) -> dict[str, Callable[[Path], object]]:
    bomb = Bomb(marker)

    def pt2(path: Path) -> None:
        exported(path)
        payload = io.BytesIO()
        torch.save(bomb, payload)
        with_payload(path, payload.getvalue())

    def script(path: Path) -> None:
        scripted(path)
        with zipfile.ZipFile(path, "a") as archive:
            folder = archive.namelist()[0].split("/")[0]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a second member of that name
                archive.writestr(f"{folder}/data.pkl", pickle.dumps(bomb, 2))

    return {
        "zip": lambda path: torch.save(bomb, path),
        "next to weights": lambda path: torch.save({"w": torch.zeros(1), "b": bomb}, path),
        "legacy": lambda path: torch.save(bomb, path, _use_new_zipfile_serialization=False),
        "bare pickle": lambda path: path.write_bytes(pickle.dumps(bomb, 2)),
        "newer pickle": lambda path: path.write_bytes(pickle.dumps(bomb, 4)),
        "pt2": pt2,
        "TorchScript": script,
    }


@pytest.mark.parametrize("kind", bombs(Path()))
def test_nothing_in_a_file_runs_without_permission(tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    bombs(marker)[kind](tmp_path / "evil.pt")
    for call in (load_module, load_weights):
        with pytest.raises(BadInput, match=r"evil\.pt: .*so it was not loaded") as caught:
            call(tmp_path / "evil.pt")
        assert "`allow_pickle`" in str(caught.value.hint)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["zip", "pt2"])
def test_the_marker_shows_that_a_payload_runs_with_permission(tmp_path: Path, kind: str) -> None:
    """Else the test above would pass with payloads that are duds."""
    bombs(tmp_path / "marker")[kind](tmp_path / "evil.pt")
    with pytest.raises(BadInput, match=r"neither a checkpoint nor|expected tuple or dict"):
        load_module(tmp_path / "evil.pt", allow_pickle=True)
    assert (tmp_path / "marker").exists()


def test_weights_from_a_file_whose_code_ran_are_marked_so(tmp_path: Path) -> None:
    torch.save({"model": MODULE.state_dict(), "made_by": os.getcwd}, tmp_path / "m.pt")
    assert load_module(tmp_path / "m.pt", arch=ARCH, inputs=[INPUT], allow_pickle=True).ran_pickle


ASKED: dict[str, tuple[bytes, bool, str]] = {
    "a function": (pickle.dumps(os.getcwd, 2), False, r"\(posix\.getcwd\)"),
    "an error of its own": (pickle.dumps(Grenade(), 2), True, "PrivateError: boom$"),
    "a missing class": (
        b"\x80\x02cnowhere_at_all\nNet\n.",
        True,
        "No module named 'nowhere_at_all'.*PYTHONPATH",
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_the_code_in_a_file_asks_for_is_named(tmp_path: Path, case: str) -> None:
    content, allow, reason = ASKED[case]
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load_module(tmp_path / "m.pt", allow_pickle=allow)
    found = caught.value
    said = f"{found.message} {found.hint}" if "PYTHONPATH" in reason else found.message
    assert re.search(rf"m\.pt: .*{reason}", said)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "net"])
def test_weights_inside_a_training_checkpoint_are_found_with_a_note(
    tmp_path: Path, key: str
) -> None:
    document = {"epoch": 3, "best": torch.tensor(0.5), key: MODULE.state_dict(), "optimizer": {}}
    torch.save(document, tmp_path / "w.pt")
    loaded = load_module(tmp_path / "w.pt", arch=ARCH, inputs=[INPUT])
    assert torch.equal(loaded.module.module.weight, MODULE.weight)
    assert loaded.notes == (f"took '{key}' out of the file; not used: epoch, best, optimizer",)
    assert set(load_weights(tmp_path / "w.pt")) == {"weight", "bias"}
    torch.save({key: MODULE, "epoch": 3}, tmp_path / "m.pt")
    loaded = load_module(tmp_path / "m.pt", inputs=[INPUT], allow_pickle=True)
    assert (loaded.source, loaded.outputs) == ("pickle", (OUTPUT,))
    assert loaded.notes == (f"took '{key}' out of the file; not used: epoch",)


@pytest.mark.parametrize(
    "content",
    [{}, {"a": 1}, [torch.zeros(1)], torch.zeros(2), {1: torch.zeros(2)}, {"model": {"a": 1}}],
    ids=repr,
)
def test_files_that_hold_something_else(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(BadInput, match="state_dict"):
        load_module(tmp_path / "x.pt")


# --- damaged and hostile files ---

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "one byte": lambda good: good[:1],
    "half": lambda good: good[: len(good) // 2],
    "last byte missing": lambda good: good[:-1],
    "middle zeroed": lambda good: good[:40] + bytes(len(good) - 80) + good[-40:],
    "noise after its head": lambda good: good[:20] + np.random.default_rng(0).bytes(5000),
}


@pytest.mark.parametrize("kind", SAVERS)
@pytest.mark.parametrize("allow_pickle", [False, True], ids=["refuse", "allow"])
def test_a_damaged_file_is_bad_input_naming_it(
    tmp_path: Path, saved: Path, kind: str, allow_pickle: bool
) -> None:
    path = tmp_path / "bad.pt"
    for damage in DAMAGE.values():
        path.write_bytes(damage((saved / kind).read_bytes()))
        with pytest.raises(BadInput, match=r"bad\.pt: "):
            load_module(path, inputs=[INPUT], allow_pickle=allow_pickle)


def test_torch_logs_no_traceback_of_its_own_for_a_damaged_pt2(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exported(tmp_path / "m.pt2")
    with_payload(tmp_path / "m.pt2", b"no pickle")
    caplog.clear()
    with pytest.raises(BadInput, match=r"m\.pt2: cannot be loaded as torch\.export"):
        load_module(tmp_path / "m.pt2", allow_pickle=True)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("kind", ["state_dict", "legacy state_dict", "safetensors"])
def test_changed_bytes_are_never_another_exception(tmp_path: Path, saved: Path, kind: str) -> None:
    good = (saved / kind).read_bytes()
    random = np.random.default_rng(3)
    path = tmp_path / "bad.pt"
    for _ in range(rounds(80, 300)):
        content = bytearray(good)
        for at in random.integers(0, len(good), 3):
            content[at] = random.integers(256)
        path.write_bytes(content)
        with contextlib.suppress(BadInput):
            read(path, allow_pickle=False)


def header(entries: object, data: bytes = b"", claimed: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> object:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = {
    "length 2^63": header({"a": 1}, claimed=1 << 63),
    "unknown dtype": header({"a": entry(0, 8, "F99")}, bytes(8)),
    "overflowing shape": header({"a": entry(0, 8, shape=(1 << 62, 8))}, bytes(8)),
    "not JSON": header(b"{" + bytes(50), bytes(8)),
    "no tensors": header({"__metadata__": {"format": "pt"}}),
    "deep": header(b"{" + b'"a":[' * 100_000 + b"}"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_safetensors_file_is_bad_input(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(HOSTILE[kind])
    with pytest.raises(BadInput, match=r"w\.safetensors: (is a .*damaged|holds no|is not a model)"):
        load_module(path, arch="torch.nn:Identity", inputs=[INPUT])


def test_a_safetensors_header_that_begins_like_a_pickle_is_recognised(tmp_path: Path) -> None:
    """A header of 0x0280 bytes: the file begins 80 02, as a pickle does."""
    text = json.dumps({"a": entry(0, 8)}).encode().ljust(0x280)
    (tmp_path / "w").write_bytes(header(text, bytes(8)))
    assert sniff(tmp_path / "w") == "safetensors"
    assert set(load_weights(tmp_path / "w")) == {"a"}


def test_an_archive_that_decompresses_to_far_more_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("m/data.pkl", "w") as member,
    ):
        for _ in range(300):
            member.write(bytes(1 << 20))
    with pytest.raises(BadInput, match=r"bomb\.pt: would unpack to 314572800 bytes"):
        load_weights(path)


class Busy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Any, d: dict[str, Any], k: int = 2, *, mask: Any) -> dict[str, Any]:
        twice = torch.cat([d["ids"], d["ids"]], 1)
        return {"a": self.linear(x) * k, "b": (x.sum(), twice, None), "x": mask.flatten(0, 1)}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    batch, length = Dim("batch", max=64), Dim("length", min=4)
    ids, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.bool)
    program = torch.export.export(
        Busy(),
        (torch.zeros(3, 4), {"ids": ids}, 3),
        {"mask": mask},
        dynamic_shapes={
            "x": {0: batch},
            "d": {"ids": {0: batch, 1: length}},
            "k": None,
            "mask": {0: batch, 1: length},
        },
    )
    path = tmp_path_factory.mktemp("programs") / "busy.pt2"
    torch.export.save(program, path)
    return path


def opened(path: Path, *inputs: str) -> Loaded:
    return load_module(path, inputs=[parse_spec(text) for text in inputs], allow_pickle=True)


def strings(specs: Sequence[object]) -> str:
    return " ".join(map(str, specs))


def test_a_program_says_its_inputs_outputs_and_ranges_itself(busy: Path) -> None:
    found = opened(busy)
    assert strings(found.inputs) == "x:float32[N,4] d_ids:int64[N,d_ids_1] mask:bool[N,d_ids_1]"
    assert strings(found.outputs) == (
        "a:float32[N,4] b_0:float32[] b_1:int64[N,b_1_1] x_2:bool[x_2_0]"
    )
    assert found.limits == {"N": (1, 64), "d_ids_1": (4, None)}
    assert (found.source, found.ran_pickle, found.notes) == ("torch.export", True, ())


def test_a_program_runs_with_its_constants_and_nested_inputs_in_place(busy: Path) -> None:
    rows, ids = np.ones((5, 4), np.float32), np.arange(30).reshape(5, 6)
    with TorchEngine(opened(busy), "busy", "cpu", None) as engine:
        answers = engine({"x": rows, "d_ids": ids, "mask": ids > 3})
        short = {"x": rows, "d_ids": ids[:, :3], "mask": ids[:, :3] > 3}
        with pytest.raises(BadInput, match=r"the model failed: .*size\(\)\[1\] >= 4"):
            engine(short)
    assert np.array_equal(answers["b_1"], np.concatenate([ids, ids], 1))
    assert np.array_equal(answers["x_2"], (ids > 3).ravel())
    assert answers["b_0"] == 20


def test_a_program_takes_no_other_description_of_its_inputs(busy: Path) -> None:
    own = opened(busy).inputs
    assert opened(busy, *map(str, own)).inputs == own
    with pytest.raises(BadInput, match=r"states its own inputs, x:float32\[N,4\], d_ids:"):
        opened(busy, "x:float32[N,4]")


# --- TorchScript ---


class Looping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        for step in range(ids.size(1)):
            x = x + step
        return self.linear(x), {"b": ids * 2}


def test_torchscript_binds_by_name_and_keeps_its_control_flow(tmp_path: Path) -> None:
    path, module = tmp_path / "looping.pt", Looping()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(module), path)
    with pytest.raises(BadInput, match="does not say what its inputs are"):
        opened(path)
    found = opened(path, "ids:int64[N,T]", "x:float32[N,4]")
    assert strings(found.outputs) == "output_0:float32[N,4] output_1_b:int64[N,T]"
    assert (found.source, found.ran_pickle) == ("TorchScript", True)
    for length in (1, 6):
        x, ids = torch.ones(2, 4), torch.ones(2, length, dtype=torch.int64)
        torch.testing.assert_close(found.module(ids, x)[0], module(x, ids)[0])
