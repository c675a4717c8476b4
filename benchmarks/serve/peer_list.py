"""Who is compared, in which version, how each is installed and started.

In: a cache folder. Out: a venv for each peer, made once, and the command of its server.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import venv
from dataclasses import dataclass, replace
from pathlib import Path

from reasons import NotMeasuredError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OURS = "deploykit"


@dataclass(frozen=True)
class Peer:
    """One server. `packages`: its own, pinned; `title` names the version of the first."""

    name: str
    title: str
    script: str
    encoding: str
    packages: tuple[str, ...]
    grpc: bool = False
    workers: int = 1

    @classmethod
    def of(cls, kind: str, workers: int) -> Peer:
        """A server of PEERS with so many worker processes."""
        one = PEERS[kind]
        if workers == 1:
            return one
        title = f"{one.title}, {workers} workers"
        return replace(one, name=f"{kind}-{workers}", title=title, workers=workers)

    def __str__(self) -> str:
        """Its title with its version."""
        own = self.packages[0].partition("==")[2] if self.packages else None
        return self.title.format(own or importlib.metadata.version(OURS))


_UVICORN = ("uvicorn==0.54.0", "httptools==0.9.0", "uvloop==0.23.0")
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "deploykit {}", "", "v2 binary", (), grpc=True),
        Peer(
            "fastapi",
            "FastAPI {} by hand, no batching",
            "fastapi_app.py",
            "raw",
            ("fastapi==0.165.0", *_UVICORN),
        ),
        Peer(
            "fastapi-batching",
            "FastAPI {} by hand, batching by hand",
            "fastapi_batching_app.py",
            "raw",
            ("fastapi==0.165.0", *_UVICORN),
        ),
        Peer("mosec", "mosec {}", "mosec_app.py", "raw", ("mosec==0.9.8",)),
    )
}
PEERS |= {peer.name: peer for peer in (Peer.of(OURS, 2), Peer.of("mosec", 2))}


def python_of(peer: Peer, cache: Path) -> Path:
    """The interpreter of the peer's venv below `cache`, made if it is not there.

    ONNX Runtime is of the version that this process has. Raises NotMeasuredError.
    """
    if not peer.packages:
        return Path(sys.executable)
    runtime = f"onnxruntime=={importlib.metadata.version('onnxruntime')}"
    wanted = "\n".join((runtime, *peer.packages))
    folder = cache / re.sub(r"[^a-z0-9.]+", "-", peer.packages[0])
    python, note = folder / "bin" / "python", folder / "installed.txt"
    if note.is_file() and note.read_text() == wanted:
        return python
    print(f"installing {peer.packages[0]} into {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *wanted.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotMeasuredError(f"not installed: {(errors or ['pip failed'])[-1]}")
    note.write_text(wanted)
    return python


def command_of(
    peer: Peer, python: Path, model: Path, port: int, threads: int, grpc_port: int
) -> list[str]:
    """What to type to serve `model` as "m" on `port`, and gRPC where the peer has it."""
    if peer.packages:
        words = [model, port, threads, grpc_port, *([peer.workers] if peer.workers > 1 else [])]
        return [str(python), str(HERE / "servers" / peer.script), *map(str, words)]
    each = max(1, threads // peer.workers)
    words = ["serve", "--engine", f"m={model}", "--http-port", port, "--threads", each]
    words += ["--workers", peer.workers]
    words += ["--device", "cpu", "--max-batch", 32, "--grpc-port", grpc_port]
    return [str(python), "-m", "deploykit", *map(str, words)]


def environment_of(peer: Peer) -> dict[str, str]:
    if not peer.packages:
        return {"PYTHONPATH": str(ROOT)}
    return {"PYTHONPATH": ""}
