"""Make `.venv` and install deploykit into it: what `make demo` and `make test` call first.

Standard library only, and idempotent: with the same `pyproject.toml` and the same choice of torch
it does nothing. On a machine without an NVIDIA GPU it takes a CPU build of torch where one can be
had: from `--torch-index` if given, else the newest that this machine's own pip finds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 10)
TORCH_OLDEST = (2, 10)  # below, torch.load(weights_only=True) has known holes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--dev", action="store_true", help="also what the tests need")
    parser.add_argument("--torch-index", default="", help="URL of an index of CPU wheels of torch")
    options = parser.parse_args()
    if sys.version_info < OLDEST:
        print(
            f"error: Python 3.10 or newer is needed, this is {sys.version.split()[0]}",
            file=sys.stderr,
        )
        print("hint: make PYTHON=python3.12 demo", file=sys.stderr)
        return 2
    gpu = has_gpu()
    extras = ["gpu" if gpu else "cpu", "export", "train", "quantize"] + ["dev"] * options.dev
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    state.update(json.dumps([extras, options.torch_index, sys.version, str(ROOT)]).encode())
    stamp = options.venv / f".deploykit-{'dev' if options.dev else 'demo'}"
    if stamp.is_file() and stamp.read_text() == state.hexdigest():
        return 0
    python = make_venv(options.venv)
    install_torch(python, gpu, options.torch_index)
    print(f"installing deploykit[{','.join(extras)}]", flush=True)
    # the torch that is there satisfies the extras, so that pip leaves it as it is
    pip(python, "install", "-qq", "--editable", f"{ROOT}[{','.join(extras)}]")
    stamp.write_text(state.hexdigest())
    return 0


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    answer = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and "GPU" in answer.stdout


def make_venv(venv: Path) -> Path:
    """The interpreter of `venv`, made if it is not there or does not start (a moved checkout)."""
    python = venv / "bin" / "python"
    works = (
        python.is_file()
        and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    )
    if not works:
        print(f"making {venv}", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=False)
        if made.returncode != 0:
            raise SystemExit(
                "error: no venv could be made; on Debian and Ubuntu: apt install python3-venv"
            )
    return python


def pip(python: Path, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, text=True, capture_output=capture, check=False)
    if done.returncode != 0 and not capture:
        raise SystemExit(f"error: failed: {' '.join(command)}")
    return done


def install_torch(python: Path, gpu: bool, index: str) -> None:
    probe = "import torch; print(torch.__version__)"
    there = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    if there.returncode == 0 and release(there.stdout.strip()) >= TORCH_OLDEST:
        print(f"torch {there.stdout.strip()} is there", flush=True)
        return
    wanted, source = ["torch"], "the package index"
    if index:
        wanted, source = ["--index-url", index, "torch"], index
    elif not gpu and (version := newest_cpu_build(python)):
        wanted, source = [f"torch=={version}"], "the CPU build that pip finds"
    announce(python, wanted, source, gpu or bool(index) or "+cpu" in wanted[-1])
    pip(python, "install", "-qq", *wanted)


def newest_cpu_build(python: Path) -> str | None:
    """The newest `X.Y.Z+cpu` that pip finds for this interpreter in its configured places."""
    listed = pip(python, "index", "versions", "torch", capture=True).stdout
    builds = [v for v in re.findall(r"[0-9][^,\s()]*\+cpu", listed) if release(v) >= TORCH_OLDEST]
    return max(builds, key=release, default=None)


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def announce(python: Path, wanted: list[str], source: str, as_wished: bool) -> None:
    """Say what will be downloaded, and how large it is, before it is."""
    arguments = ["install", "--dry-run", "-qq", "--report", "-", *wanted]
    answer = pip(python, *arguments, capture=True)
    if answer.returncode != 0:
        raise SystemExit(
            f"error: pip finds no torch for Python {sys.version.split()[0]}: {answer.stderr}"
        )
    urls = [item["download_info"]["url"] for item in json.loads(answer.stdout)["install"]]
    sizes = [size_of(url) for url in urls]
    known = sum(size for size in sizes if size is not None)
    unknown = f" and {sizes.count(None)} of unknown size" if None in sizes else ""
    print(f"torch from {source}: {len(urls)} packages, {known / 1e6:,.0f} MB{unknown}", flush=True)
    if not as_wished:
        print(
            "note: that is the build with CUDA, and no GPU is here; stop with Ctrl-C and give an",
            flush=True,
        )
        print(
            "note: index of CPU wheels (pytorch.org names one): make demo TORCH_INDEX=URL",
            flush=True,
        )


def size_of(url: str) -> int | None:
    """Bytes at `url`, None where neither the file nor the server tells."""
    if url.startswith("file://"):
        path = Path(urllib.request.url2pathname(url.removeprefix("file://").partition("#")[0]))
        return path.stat().st_size if path.is_file() else None
    try:
        request = urllib.request.Request(url.partition("#")[0], method="HEAD")
        with urllib.request.urlopen(request, timeout=20) as answer:
            length = answer.headers.get("Content-Length")
    except (OSError, ValueError):
        return None
    return int(length) if length and length.isdigit() else None


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main())
