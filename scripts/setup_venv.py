"""Make `.venv` and install deploykit into it: what `make demo` and `make test` call first.

Standard library only, and idempotent: with the same `pyproject.toml` and the same choice of torch
it does nothing. On a machine without an NVIDIA GPU it takes a CPU build of torch where one can be
had: from `--torch-index` if given, else the newest that this machine's own pip finds. `--lint` adds
the linters, `--dev` what the tests need too, with the torchvision of that torch; where there is
none, the tests that need it are skipped. uv installs, from the places that pip is configured for:
it resolves and unpacks in a quarter of pip's time. Where it cannot be had, or fails, pip does.
On a Jetson pip does, as uv would hide the packages that are there with others of the same name.
"""

from __future__ import annotations

import argparse
import ast
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
QUICK = ("-qq", "--no-compile")  # Python compiles what it imports: a small part of the packages
OPTIONS = {  # of pip's settings -> of uv
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES = {"cert": "SSL_CERT_FILE", "proxy": "HTTPS_PROXY", "default-timeout": "UV_HTTP_TIMEOUT"}
TORCH_OLDEST = (2, 10)  # below, torch.load(weights_only=True) has known holes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--lint", action="store_true", help="also ruff and mypy")
    parser.add_argument("--dev", action="store_true", help="also what the tests need")
    parser.add_argument("--gpu", action="store_true", help="also TensorRT for this driver")
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
    name = "dev" if options.dev else "lint" if options.lint else "demo"
    jetson = is_jetson()
    runtime, tensorrt = gpu_extras(driver_version(), jetson)
    extras = [runtime, "serve", "export", "train", "quantize"]
    extras += [name] if name != "demo" else []
    if jetson and options.gpu:  # it is all on PyPI, and `dev` alone takes newer CUDA bindings
        extras, tensorrt = [*extras, tensorrt], ""
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes())
    state.update(json.dumps([extras, options.torch_index, sys.version, str(ROOT)]).encode())
    stamp = options.venv / f".deploykit-{name}"
    if stamp.is_file() and stamp.read_text() == state.hexdigest():
        return install_tensorrt(options.venv / "bin" / "python", tensorrt) if options.gpu else 0
    python = make_venv(options.venv)
    if jetson and version_in(python, "onnxruntime-gpu"):
        extras.remove(runtime)  # its module would hide the one that is there
    torch = torch_to_install(python, gpu, options.torch_index)
    print(f"installing deploykit[{','.join(extras)}]", flush=True)
    # where torch is there it satisfies the extras, so that it is left as it is
    install(python, *torch, "--editable", f"{ROOT}[{','.join(extras)}]")
    if options.dev:
        install_torchvision(python, options.torch_index)
    stamp.write_text(state.hexdigest())
    return install_tensorrt(python, tensorrt) if options.gpu else 0


def gpu_extras(driver: str, jetson: bool) -> tuple[str, str]:
    """(the extra for ONNX Runtime, the extra for TensorRT) by the driver; empty where none fits.

    On a Jetson PyPI's onnxruntime-gpu has no kernels for its GPU, and TensorRT is JetPack's.
    """
    if jetson:
        return "cpu", "jetson"
    major = int(driver.partition(".")[0] or 0) if driver[:1].isdigit() else 0
    if major >= 580:
        return "gpu", "tensorrt-cu13"
    return "cpu", "tensorrt-cu12" if major >= 525 else ""


def install_tensorrt(python: Path, extra: str) -> int:
    """TensorRT comes from NVIDIA's own index: where that cannot be reached, a note says so."""
    if extra and not version_in(python, extra):
        print(f"installing deploykit[{extra}]", flush=True)
        command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", *QUICK]
        done = subprocess.run([*command, "--editable", f"{ROOT}[{extra}]"], check=False)
        if done.returncode != 0:
            print(f"note: deploykit[{extra}] was not installed, as said above", flush=True)
    return 0


def is_jetson(root: Path = Path("/")) -> bool:
    return (root / "etc/nv_tegra_release").is_file()


def driver_version() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = answer.stdout.splitlines() if answer.returncode == 0 else []
    return lines[0].strip() if lines else ""


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
        command = [sys.executable, "-m", "venv", "--clear", str(venv)]
        # JetPack's TensorRT and CUDA are packages of the system's Python
        command += ["--system-site-packages"] if is_jetson() else []
        made = subprocess.run(command, check=False)
        if made.returncode != 0:
            raise SystemExit(
                "error: no venv could be made; on Debian and Ubuntu: apt install python3-venv"
            )
        if not is_jetson():  # uv does not see those packages, and would install them once more
            pip(python, "install", *QUICK, "uv", capture=True)
    return python


def install(python: Path, *wanted: str) -> None:
    """Install `wanted`, words that uv and pip both know, into the venv of `python`."""
    uv = python.with_name("uv")
    if uv.is_file():
        listed = pip(python, "config", "list", capture=True).stdout
        options, variables = for_uv(listed)
        command = [str(uv), "pip", "install", "--quiet", "--python", str(python), *options, *wanted]
        if subprocess.run(command, env={**os.environ, **variables}, check=False).returncode == 0:
            return
        print("note: uv cannot install this, as said above; pip tries", flush=True)
    pip(python, "install", *QUICK, *wanted)


def for_uv(listed: str) -> tuple[list[str], dict[str, str]]:
    """What `pip config list` says of places and certificates, as options and variables for uv.

    A variable of pip's comes after its files in the list, and replaces what they say. uv would take
    a package from the first index that has it; pip takes the best version of all, and so do we.
    """
    found = re.findall(r"^[\w:]+\.([\w-]+)=(.*)$", listed, re.MULTILINE)
    settings = {key: str(ast.literal_eval(value)) for key, value in found}
    options = ["--index-strategy", "unsafe-best-match"]
    for key, option in OPTIONS.items():
        for place in settings.get(key, "").split():
            options += [option, place]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    named = {name: settings[key] for key, name in VARIABLES.items() if settings.get(key)}
    return options, {"UV_LINK_MODE": "copy", **named}


def pip(
    python: Path, *arguments: str, capture: bool = False, alone: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run pip; `alone`: with the places named in the arguments and no others."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    place = dict(os.environ)
    if alone:
        places = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
        place = {k: v for k, v in place.items() if k not in places} | {
            "PIP_CONFIG_FILE": os.devnull
        }
    done = subprocess.run(command, text=True, capture_output=capture, check=False, env=place)
    if done.returncode != 0 and not capture:
        raise SystemExit(f"error: failed: {' '.join(command)}")
    return done


def torch_to_install(python: Path, gpu: bool, index: str) -> list[str]:
    """What pip is asked for to get torch, empty if it is there."""
    there = version_in(python, "torch")
    if release(there) >= TORCH_OLDEST:
        print(f"torch {there} is there", flush=True)
        return []
    wanted, source = ["torch"], "the package index"
    if index:
        versions = versions_of_torch(python, index)
        if not versions:
            raise SystemExit(f"error: {index}: no torch for Python {sys.version.split()[0]} there")
        wanted, source = [f"torch=={max(versions, key=release)}", "--extra-index-url", index], index
    elif not gpu:
        builds = [v for v in versions_of_torch(python) if v.endswith("+cpu")]
        if builds:
            wanted, source = [f"torch=={max(builds, key=release)}"], "the CPU build that pip finds"
    announce(python, wanted, source, as_wished=gpu or len(wanted) > 1 or "==" in wanted[0])
    return wanted


def install_torchvision(python: Path, index: str) -> None:
    """The torchvision that was made for the torch that is there; a note where pip has none.

    Without what it asks for: torch is there, numpy and Pillow come with the extras, and pip would
    take the torch with CUDA for a torchvision that was built for it.
    """
    torch, there = version_in(python, "torch"), version_in(python, "torchvision")
    if matching_torchvision([there], torch):
        return
    version, where = None, []
    if index:
        version = matching_torchvision(versions_of(python, "torchvision", index), torch)
        where = ["--extra-index-url", index] if version else []
    version = version or matching_torchvision(versions_of(python, "torchvision"), torch)
    if version is None:
        print(f"note: no torchvision for torch {torch}: tests that need it are skipped", flush=True)
        return
    print(f"installing torchvision {version}", flush=True)
    install(python, "--no-deps", *where, f"torchvision=={version}")


def matching_torchvision(versions: list[str], torch: str) -> str | None:
    """The newest of `versions` that belongs to this torch, of the same build if there is one.

    torchvision 0.(n+15) is made for torch 2.n (the table in torchvision's README).
    """
    torch_release, build = release(torch), torch.partition("+")[2]
    if torch_release[:1] != (2,):
        return None
    wanted = (0, torch_release[1] + 15)
    fitting = [version for version in versions if release(version)[:2] == wanted]
    return max(fitting, key=lambda v: (v.partition("+")[2] == build, release(v)), default=None)


def version_in(python: Path, package: str) -> str:
    """The installed version of `package`, empty if it is not there; it is not imported."""
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    done = subprocess.run([python, "-c", code, package], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def versions_of_torch(python: Path, index: str = "") -> list[str]:
    """The versions of torch that pip finds and that are not too old."""
    return [v for v in versions_of(python, "torch", index) if release(v) >= TORCH_OLDEST]


def versions_of(python: Path, package: str, index: str = "") -> list[str]:
    """The versions that pip finds for this interpreter: in its configured places, or in `index`."""
    where = ["--index-url", index] if index else []
    listed = pip(
        python, "index", "versions", package, *where, capture=True, alone=bool(index)
    ).stdout
    _, found, versions = listed.partition("Available versions:")
    return [v.strip() for v in versions.partition("\n")[0].split(",")] if found else []


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def announce(python: Path, wanted: list[str], source: str, *, as_wished: bool) -> None:
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
