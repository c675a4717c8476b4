"""An artefact: a file that deploykit wrote or can open, and the manifest `FILE.json` next to it.

The format is read from the bytes, never from the name. `Artefact` sniffs, hashes and reads the
manifest once; functions take a path or an `Artefact` and pass the `Artefact` on. A manifest holds
tensors, precision, hash, origin and evidence; `manifest.schema.json` is its JSON Schema.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.evidence import Evidence
from deploykit.core.files import (
    StrPath,
    check_inside,
    check_utf8,
    manifest_path,
    open_readable,
    read_json,
    sha256,
    write_json,
)
from deploykit.core.json_value import Shown, field_types, from_json, json_value
from deploykit.core.runtime import ALL, BY_FORMAT, READS, Runtime
from deploykit.core.task import Task
from deploykit.core.tensors import TensorSpec, make_spec

_ZIP = b"PK\x03\x04"
_EXPORTED = {"archive_format", "serialized_exported_program.json"}  # a newer and an older .pt2
_TAKEN = {  # format -> what it is called, and the commands that take it
    "onnx": ("an ONNX file", "quantize, build, bench, compare, predict and serve take it"),
    "tensorrt": ("a TensorRT engine", "bench, compare, predict and serve take it"),
    "openvino": ("built for OpenVINO", "bench, compare, predict and serve take it"),
    "torch": ("a PyTorch file", "deploykit export makes an .onnx file of it"),
    "safetensors": ("a .safetensors file", "deploykit export makes an .onnx file of it"),
}
_UNPACKED_TEXT_BYTES = 256 << 20  # torch compresses the code and the graph, not the weights
MANIFEST_VERSION = 2


@dataclass(frozen=True)
class Manifest:
    """The facts about one artefact. Hashes are SHA-256 in hexadecimal.

    `precision`: number of nodes by the type they compute in. `made_from`: hashes of the sources.
    `made_with`: version by tool. `built_on`: profile, device, versions. `task`: None where the
    model's purpose is not known.
    """

    format: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: Mapping[str, int] = field(default_factory=dict)
    sha256: str = ""
    made_from: tuple[str, ...] = ()
    made_with: Mapping[str, str] = field(default_factory=dict)
    built_on: Mapping[str, str] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)
    task: Task | None = None

    @property
    def version_compatible(self) -> bool:
        """Whether this is a TensorRT engine that later versions of the same major run too."""
        return self.evidence.build is not None and self.evidence.build.version_compatible

    @property
    def plugins(self) -> Mapping[str, str]:
        """The libraries that an engine needs to run: path -> SHA-256."""
        return self.evidence.build.plugins if self.evidence.build else {}

    def to_dict(self) -> dict[str, Any]:
        return {"manifest": MANIFEST_VERSION, **json_value(self)}


def write_manifest(artefact: Path, manifest: Manifest) -> None:
    """Write `FILE.json`. Write `artefact` first: a manifest never names a missing file."""
    write_json(manifest_path(artefact), manifest.to_dict())


def load_manifest(artefact: Path) -> Manifest | None:
    """Return the manifest next to `artefact` without comparing hashes; None if there is none."""
    where = str(manifest_path(artefact))
    try:
        values = read_json(Path(where))
    except NotFound:
        return None
    if not isinstance(values, dict) or values.get("manifest") != MANIFEST_VERSION:
        raise BadInput(
            f"{where}: is not a deploykit manifest of version {MANIFEST_VERSION}",
            hint="make the file that it describes again",
        )
    if missing := field_types(Manifest).keys() - values.keys() - {"task"}:
        raise BadInput(f"{where}: '{min(missing)}' is missing")
    found: Manifest = from_json(Manifest, values, where)
    for spec in (*found.inputs, *found.outputs):
        make_spec(f"{where}: {spec.name}", spec.dtype, spec.shape)  # raises for an odd type or size
    return found


class Artefact(Shown):
    """One file with its format, hash and manifest, each found on first use and then kept."""

    in_notebook = ("path",)

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self._stamp = file_stamp(self.path)

    @classmethod
    def open(cls, source: ArtefactLike) -> Artefact:
        """Return `source` as an Artefact of a known format; a replaced file is opened again.

        Raises as `sniff` does.
        """
        found = source if isinstance(source, Artefact) else cls(source)
        if found._stamp != file_stamp(found.path):
            found = cls(found.path)
        found.format  # noqa: B018 - raises for a file that is not a model
        return found

    @classmethod
    def from_manifest(cls, path: StrPath, manifest: Manifest) -> Artefact:
        """Return the Artefact of a file that was just written, without reading it again."""
        found = cls(path)
        vars(found).update(format=manifest.format, sha256=manifest.sha256, manifest=manifest)
        return found

    @cached_property
    def format(self) -> str:
        """The format as the table of runtimes names it: "onnx", "torch". Raises as `sniff` does."""
        return sniff(self.path)

    @property
    def runtime(self) -> Runtime:
        """The runtime that opens the file."""
        return BY_FORMAT[self.format]

    @cached_property
    def sha256(self) -> str:
        """The file's SHA-256 in hexadecimal; weights in a second file are not part of it."""
        return sha256(self.path)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest next to the file, checked against the file's hash; None without one.

        The hash of the file that holds its weights is checked too. Raises BadInput.
        """
        found = load_manifest(self.path)
        if found is None:
            return None
        where, weights = manifest_path(self.path), found.evidence.weights
        files = [(self.path, found.sha256, self.sha256)] if found.sha256 else []
        if weights is not None:
            check_inside(self.path.parent, weights.file, f"{where}: its weights")
            file = self.path.with_name(weights.file)
            files.append((file, weights.sha256, sha256(file)))
        for file, expected, actual in files:
            if expected != actual:
                raise BadInput(
                    f"{file}: is not the file that {where.name} describes (SHA-256 differs)",
                    hint=f"make it again, or remove {where} if you changed the file on purpose",
                )
        return found

    @property
    def task(self) -> Task | None:
        """The task of the model; None if its manifest names none."""
        return self.manifest.task if self.manifest else None

    @property
    def facts(self) -> dict[str, Any]:
        """Return name, SHA-256, size, time of writing, and the manifest's nodes by precision."""
        _, size, modified_ns = self._stamp or (0, 0, 0)
        return {
            "name": self.name,
            "sha256": self.sha256,
            "bytes": size,
            "written_s": modified_ns / 1e9,
            "precision": dict(self.manifest.precision) if self.manifest else {},
        }

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.path.name

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def __repr__(self) -> str:
        return f"Artefact({str(self.path)!r})"


ArtefactLike = StrPath | Artefact


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return values that change when a file is replaced or written; None if it does not exist."""
    try:
        info = path.stat()
    except (OSError, ValueError):
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


def sniff(path: Path) -> str:
    """Return the format of the file at `path`, one that a runtime of the table opens.

    "torch" is a zip or pickle checkpoint, a `.pt2` or TorchScript; `torch_kind` tells them apart.
    Raises NotFound or BadInput if the file cannot be read or has another format.
    """
    with open_readable(path) as handle:
        check_utf8(path)
        head = handle.read(512)
    if head[:4] == b"vtrt":
        raise Unsupported(
            f"{path}: is a TensorRT for RTX engine, which TensorRT cannot load",
            hint="build an engine for the target with: deploykit build model.onnx --profile NAME",
        )
    for runtime in ALL:
        offset, magic = runtime.magic
        if magic and head.startswith(magic, offset):
            return runtime.opens[0]
    # safetensors is checked before pickle: its first field, a length, may begin with 80 02
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size - 8:
        return "safetensors"
    if head[:4] == _ZIP:
        _torch_members(path)
        return "torch"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "torch"
    if head[:1] == b"\x08" and len(head) > 2 and head[1] < 0x80:
        return "onnx"
    raise BadInput(
        f"{path}: {_unknown(head)}",
        hint=f"deploykit reads {', '.join(READS[:-1])} and {READS[-1]} files",
    )


def wrong_format(path: object, found: str, needed: str) -> BadInput:
    """Return the error for a model of the known format `found` where `needed` is required."""
    what, cure = _TAKEN.get(found, (f"a {found} file", None))
    return BadInput(f"{path}: is {what}, {needed} is needed", hint=cure)


def torch_kind(path: Path) -> str:
    """Return the kind of a "torch" file: "torch.export", "TorchScript" or "pickle".

    A "pickle" may be weights alone, a deploykit checkpoint or a whole module: only reading it
    shows which. Raises BadInput.
    """
    with path.open("rb") as handle:
        if handle.read(4) != _ZIP:
            return "pickle"  # the format of torch before 1.6
    members = _torch_members(path)
    if members & _EXPORTED:
        return "torch.export"
    return "TorchScript" if "constants.pkl" in members else "pickle"  # torch.load tests the same


def _torch_members(path: Path) -> set[str]:
    """Return the names, without folders, in PyTorch's zip file. Raises BadInput for any other."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as exc:
        raise BadInput(f"{path}: is a truncated or damaged PyTorch file: {exc}") from exc
    names = {info.filename.rsplit("/", 1)[-1] for info in infos}
    if names & (_EXPORTED | {"data.pkl"}):
        unpacked = sum(info.file_size for info in infos)
        if unpacked > path.stat().st_size + _UNPACKED_TEXT_BYTES:
            raise BadInput(f"{path}: would unpack to {unpacked} bytes, which no PyTorch file does")
        return names
    if any(name.endswith(".npy") for name in names):
        raise BadInput(
            f"{path}: holds NumPy arrays (.npz), a model is needed",
            hint="arrays go in as data: deploykit predict MODEL DATA; --calib, --data or --samples",
        )
    raise BadInput(f"{path}: is a zip archive, but not one that PyTorch wrote")


def _unknown(head: bytes) -> str:
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype", b"<html")):
        return "is a web page, not a model (the download probably failed)"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the model itself (run: git lfs pull)"
    if head[8:9] == b"{" and b"\0" in head[:8]:
        claimed = int.from_bytes(head[:8], "little")
        return f"is a truncated or damaged .safetensors file (a header of {claimed} bytes)"
    return "is not a model file of a known format"
