"""Load a Triton bundle into the Triton that PyTriton ships, ask it with tritonclient, and report.

    python -m benchmarks.triton_server [--venv DIR]      (installs nvidia-pytriton into DIR)

That Triton has no ONNX Runtime backend. The first load shows it; for the second, a Python backend
of the same name stands in: Triton itself reads the configuration, runs the warm-up, checks shapes
and joins requests, and only the call of ONNX Runtime is the stand-in's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from deploykit.core.tensors import TensorSpec
from deploykit.deploying import triton
from tests.support.bundling.contents import contents_of

HTTP, GRPC = 18000, 18001
WAIT_S = 60
MODELS: dict[str, tuple[list[TensorSpec], bool]] = {  # name -> inputs, whether rows are joined
    "image": ([TensorSpec("image", "float32", ("N", 3, 8, 8))], True),
    "several": (
        [
            TensorSpec('a "q" ✓', "int64", ("N", "T")),
            TensorSpec("s", "string", ("N", 2)),
            TensorSpec("b", "bool", ("N",)),
        ],
        True,
    ),
    "fixed": ([TensorSpec("x", "float16", (4, "T")), TensorSpec("n", "int64", ())], False),
}
STAND_IN = """
import json, os
import numpy as np
import onnxruntime
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.joined = json.loads(args["model_config"])["max_batch_size"] > 0
        folder = os.path.join(args["model_repository"], args["model_version"])
        self.session = onnxruntime.InferenceSession(os.path.join(folder, "model.onnx"))
        self.ranks = {each.name: len(each.shape) for each in self.session.get_inputs()}
        self.names = [each.name for each in self.session.get_outputs()]

    def tensor(self, request, name, rank):
        array = pb.get_input_tensor_by_name(request, name).as_numpy()
        if array.dtype == object:
            decoded = [value.decode() for value in array.reshape(-1)]
            array = np.array(decoded, object).reshape(array.shape)
        return array.reshape(array.shape[:rank])  # one element where the model has a scalar

    def execute(self, requests):
        feeds = [{n: self.tensor(r, n, k) for n, k in self.ranks.items()} for r in requests]
        if self.joined:
            rows = np.cumsum([len(next(iter(each.values()))) for each in feeds])[:-1]
            joined = {n: np.concatenate([each[n] for each in feeds]) for n in self.ranks}
            found = self.session.run(self.names, joined)
            answers = zip(*(np.split(each, rows) for each in found))
        else:
            answers = [self.session.run(self.names, each) for each in feeds]
        return [
            pb.InferenceResponse([pb.Tensor(n, v) for n, v in zip(self.names, values)])
            for values in answers
        ]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "pytriton")
    home = install(parser.parse_args().venv)
    with tempfile.TemporaryDirectory() as folder:
        repository = write_models(Path(folder))
        with server(home, repository, home / "backends") as log:
            reason = [line for line in log().splitlines() if "failed to load" in line]
            print("as shipped:", reason[0].partition("] ")[2] if reason else "loaded")
        backends = with_stand_in(home, Path(folder) / "backends")
        with server(home, repository, backends) as log:
            print("with the stand-in:", ask())
    return 0


def install(place: Path) -> Path:
    """The folder of Triton in a venv of its own."""
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        command = [python, "-m", "pip", "install", "-q", "nvidia-pytriton", "onnxruntime"]
        subprocess.run(command, check=True)
    return next(place.glob("lib/python*/site-packages/pytriton/tritonserver"))


def write_models(folder: Path) -> Path:
    repository = folder / "repository"
    repository.mkdir()
    for name, (specs, joined) in MODELS.items():
        source, out = folder / name, folder / f"{name}.out"
        source.mkdir()
        out.mkdir()
        proof = {} if joined else {"proof": None}
        triton.write(out, contents_of(source, specs, name=name, **proof))
        shutil.move(out / name, repository / name)
    return repository


def with_stand_in(home: Path, backends: Path) -> Path:
    shutil.copytree(home / "backends", backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = "triton_python_backend_stub"
    shutil.copy2(home / "python_backend_stubs" / version / stub, backends / "python" / stub)
    (backends / "onnxruntime").mkdir()
    (backends / "onnxruntime" / "model.py").write_text(STAND_IN, encoding="utf-8")
    return backends


@contextmanager
def server(home: Path, repository: Path, backends: Path) -> Iterator[Any]:
    """Run Triton until it is ready or has ended; yields what reads its log."""
    packages = home.parents[1]
    libraries = [sysconfig.get_config_var("LIBDIR"), packages / "nvidia_pytriton.libs"]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "PYTHONPATH": str(packages),
        "PATH": f"{packages.parents[2] / 'bin'}:{os.environ['PATH']}",
    }
    command = [str(home / "bin" / "tritonserver"), "--allow-metrics=false"]
    command += ["--model-repository", str(repository), "--backend-directory", str(backends)]
    command += ["--http-port", str(HTTP), "--grpc-port", str(GRPC)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

        def log() -> str:
            output.seek(0)
            return output.read()

        try:
            end = time.monotonic() + WAIT_S
            while process.poll() is None and time.monotonic() < end:
                try:
                    urlopen(f"http://127.0.0.1:{HTTP}/v2/health/ready").close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield log
        finally:
            process.terminate()
            process.wait()


def ask() -> str:
    import tritonclient.http as http

    client = http.InferenceServerClient(f"127.0.0.1:{HTTP}", concurrency=8)

    def tensors(**arrays: tuple[str, np.ndarray]) -> list[Any]:
        found = []
        for name, (kind, array) in arrays.items():
            found.append(http.InferInput(name, list(array.shape), kind))
            found[-1].set_data_from_numpy(array)
        return found

    image = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    assert np.array_equal(
        client.infer("image", tensors(image=("FP32", image))).as_numpy("image out"), image
    )
    several = {
        'a "q" ✓': ("INT64", np.arange(6).reshape(2, 3)),
        "s": ("BYTES", np.array([["a", "b"], ["ü", ""]], object)),
        "b": ("BOOL", np.array([[True], [False]])),
    }
    answer = client.infer("several", tensors(**several))
    assert answer.as_numpy('a "q" ✓ out').tolist() == [[0, 1, 2], [3, 4, 5]]
    assert answer.as_numpy("s out").tolist() == [[b"a", b"b"], ["ü".encode(), b""]]
    assert answer.as_numpy("b out").tolist() == [[True], [False]]
    fixed = {"x": ("FP16", np.ones((4, 5), np.float16)), "n": ("INT64", np.array([7]))}
    assert client.infer("fixed", tensors(**fixed)).as_numpy("x out").shape == (4, 5)
    calls = [client.async_infer("image", tensors(image=("FP32", image[:1]))) for _ in range(64)]
    for call in calls:
        call.get_result()
    stats = client.get_inference_statistics("image")["model_stats"][0]
    return (
        f"{', '.join(MODELS)} answered; of 'image' {stats['inference_count']} rows, warm-up "
        f"included, in {stats['execution_count']} batches"
    )


if __name__ == "__main__":
    sys.exit(main())
