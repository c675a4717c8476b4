"""CUDA shared memory on a real GPU: a client in another process, its memory, a real server."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.serving.conftest import running

CLIENT = """
import base64, ctypes, json, sys
import numpy as np
from cuda.bindings import runtime as cudart

def done(result):
    assert result[0] == cudart.cudaError_t.cudaSuccess, result
    return result[1] if len(result) == 2 else result[1:]

def copy(to, source, nbytes):
    done(cudart.cudaMemcpy(to, source, nbytes, cudart.cudaMemcpyKind.cudaMemcpyDefault))

done(cudart.cudaSetDevice(0))
values = np.arange(1024, dtype=np.float32)
address = int(done(cudart.cudaMalloc(8 << 20)))  # first the input, at 4 MiB the output
copy(address, values.ctypes.data, values.nbytes)
done(cudart.cudaDeviceSynchronize())
handle = ctypes.string_at(done(cudart.cudaIpcGetMemHandle(address)).getPtr(), 64)
print(base64.b64encode(handle).decode(), flush=True)
sys.stdin.readline()  # the server has answered
copy(values.ctypes.data, address + (4 << 20), values.nbytes)
print(json.dumps(values.tolist()), flush=True)
sys.stdin.readline()  # the server has let go of it
"""
HALF = 4 << 20


@pytest.mark.gpu
def test_another_process_shares_its_gpu_memory() -> None:
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    from deploykit.core.errors import Unsupported
    from deploykit.runtimes.cuda.driver import ipc_devices

    try:
        devices = ipc_devices()
    except Unsupported as exc:
        pytest.skip(exc.message)
    if 0 not in devices:
        pytest.skip("cuda:0 opens no memory of other processes")
    child = subprocess.Popen(
        [sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        raw = child.stdout.readline().strip()
        assert len(base64.b64decode(raw)) == 64
        with running(shared_memory=True, max_batch=256) as server:
            extensions = server.ask("GET", "/v2").json["extensions"]
            assert "cuda_shared_memory" in extensions
            target = "/v2/cudasharedmemory/region"

            def register(name: str, text: str, size: int) -> int:
                body = {"raw_handle": {"b64": text}, "device_id": 0, "byte_size": size}
                path = f"{target}/{name}/register"
                return server.ask("POST", path, json.dumps(body).encode()).status

            assert register("large", raw, 1 << 40) == 400
            assert register("none", base64.b64encode(bytes(64)).decode(), 64) in (400, 503)
            assert register("r", raw, 2 * HALF) == 200
            place = {"shared_memory_region": "r", "shared_memory_byte_size": 4096}
            given = {"name": "x", "datatype": "FP32", "shape": [256, 4], "parameters": place}
            wanted = {"name": "y", "parameters": {**place, "shared_memory_offset": HALF}}
            body = json.dumps({"inputs": [given], "outputs": [wanted]}).encode()
            reply = server.ask("POST", "/v2/models/m/infer", body)
            assert reply.status == 200, reply.body
            child.stdin.write("\n")
            child.stdin.flush()
            found = json.loads(child.stdout.readline())
            assert np.array_equal(found, 2 * np.arange(1024) + 1)
            assert server.ask("POST", f"{target}/r/unregister").status == 200
            assert server.ask("POST", "/v2/models/m/infer", body).status == 400
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.communicate()
