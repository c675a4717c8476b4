"""Carry packages to a GPU machine without a network, in parts that fit one transfer each.

    python -m scripts.gpu.carry pack OUT base ort      # here: OUT/base-1, OUT/ort-1, ...
    python3 scripts/gpu/carry.py unpack OUT/ort-1 DEST  # there, for each part; --site DEST/site

What a bundle holds is in `BUNDLES`: wheels for CPython 3.12 on x86-64. A part is complete or
refused by its SHA-256; with the last one the bundle is unpacked. Standard library, pip and tar.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

PART_BYTES = 50 << 20  # a transfer of 64 MiB holds the checkout, too
_TARGET = ["--python-version", "3.12", "--only-binary=:all:", "--no-compile"]
_TARGET += [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 27, 17)]
_TARGET += ["--platform=manylinux2014_x86_64"]
BUNDLES = {  # the requirements of `base` need no package that the machine's torch brings
    "base": "cuda-bindings>=13 nvidia-ml-py typer>=0.28 hpack httptools orjson prometheus-client "
    "protobuf uvloop",
    "ort": "--no-deps onnxruntime-gpu flatbuffers packaging",
}
_UNUSED = (  # of ONNX Runtime: its C library, TensorRT 10's provider, tools
    "onnxruntime/capi/libonnxruntime.so*",
    "onnxruntime/capi/libonnxruntime_providers_tensorrt.so",
    "onnxruntime/tools",
    "onnxruntime/transformers",
    "bin",
)


def pack(out: Path, name: str) -> list[Path]:
    """The folders of the bundle's parts, each with the parts' sums."""
    with tempfile.TemporaryDirectory() as work:
        site, archive = Path(work, "site"), Path(work, "site.tar.gz")
        command = [sys.executable, "-m", "pip", "install", "-q", *_TARGET, "--target", str(site)]
        subprocess.run([*command, *BUNDLES[name].split()], check=True)
        for pattern in _UNUSED:
            for path in site.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with tarfile.open(archive, "w:gz", compresslevel=9) as tar:
            tar.add(site, "site")
        return split(archive, out, name)


def split(archive: Path, out: Path, name: str, part_bytes: int = PART_BYTES) -> list[Path]:
    folders, sums = [], {}
    with archive.open("rb") as file:
        while content := file.read(part_bytes):
            folder = out / f"{name}-{len(folders) + 1}"
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{name}.part.{len(folders) + 1:02}"
            part.write_bytes(content)
            sums[part.name] = hashlib.sha256(content).hexdigest()
            folders.append(folder)
    for folder in folders:
        (folder / f"{name}.sums.json").write_text(json.dumps(sums, indent=1), encoding="utf-8")
    return folders


def unpack(sent: Path, dest: Path) -> str:
    """Keep the part in `sent`; with the last one, unpack the bundle to `dest`/site."""
    (listed,) = sent.glob("*.sums.json")
    name, sums = listed.name.partition(".")[0], json.loads(listed.read_text(encoding="utf-8"))
    parts = dest / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for path in sent.glob(f"{name}.part.*"):
        if hashlib.sha256(path.read_bytes()).hexdigest() != sums[path.name]:
            raise SystemExit(f"error: {path}: damaged on its way")
        shutil.copyfile(path, parts / path.name)
    missing = [part for part in sums if not (parts / part).is_file()]
    if missing:
        return f"{name}: still missing: {' '.join(missing)}"
    with tempfile.TemporaryFile() as whole:
        for part in sorted(sums):
            with (parts / part).open("rb") as file:
                shutil.copyfileobj(file, whole)
            (parts / part).unlink()
        whole.seek(0)
        # before 3.10.12 and 3.11.4, tarfile may write outside `dest`; tar does not
        command = ["tar", "-xz", "--no-same-owner", "--no-same-permissions", "-C", str(dest)]
        subprocess.run(command, stdin=whole, check=True)
    return f"{name}: unpacked to {dest / 'site'}"


def main() -> Iterator[str]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("rest", nargs="+", metavar="BUNDLE or DEST")
    options = parser.parse_args()
    if options.verb == "unpack":
        yield unpack(options.folder, Path(options.rest[0]))
        return
    for name in options.rest:
        for folder in pack(options.folder, name):
            size = sum(path.stat().st_size for path in folder.iterdir())
            yield f"{folder}: {size:,} bytes"


if __name__ == "__main__":
    for line in main():
        sys.stdout.write(f"{line}\n")
