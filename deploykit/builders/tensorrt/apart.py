"""Build in this process, or in one of its own whose memory is free again when it has ended.

TensorRT keeps what its builder allocated. On a board where CPU and GPU share memory, the engine
that is loaded next would lack it; and where the system ends a process for want of memory, it ends
the build and not the caller.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploykit.builders.builder import BuildResult
from deploykit.builders.tensorrt import build as plans
from deploykit.builders.tensorrt.options import Options
from deploykit.builders.tensorrt.progress import OnProgress
from deploykit.core.errors import DeploykitError, OutOfMemory

COMMAND = (sys.executable, "-m", "deploykit.builders.tensorrt.apart")
_PATIENCE_S = 30  # TensorRT asks between kernels whether to stop


def build_here(
    model: Path, out: Path, options: Options, on_progress: OnProgress | None = None
) -> BuildResult:
    """`plans.build` on the GPU of `options`, within its free memory."""
    try:
        from deploykit.runtimes.cuda.driver import CudaDevice

        driver = CudaDevice(options.device)
        driver.use()  # TensorRT builds for this thread's GPU
        options = replace(options, free_bytes=driver.memory()[0])
    except DeploykitError:  # no CUDA: TensorRT itself reports what is missing
        pass
    return plans.build(model, out, options, on_progress)


def build_apart(
    model: Path, out: Path, options: Options, on_progress: OnProgress | None = None
) -> BuildResult:
    """`build_here` in a process of its own; raises what it raises, and OutOfMemory if killed."""
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        try:
            with contextlib.suppress(BrokenPipeError):
                _send_job(process, (model, out, options))
            while (message := _receive(process)) is not None:
                kind, *content = message
                if kind == "progress" and on_progress is not None:
                    on_progress(*content)
                elif kind == "error":
                    raise content[0]
                elif kind == "result":
                    return content[0]  # type: ignore[no-any-return]
        except BaseException:
            _stop(process)
            raise
        code = process.wait()
    if code == -signal.SIGKILL:
        raise OutOfMemory(
            f"{model}: the system ended the build, as it does where memory runs out",
            hint="a smaller `workspace` or batch; stop other programs, the desktop first; add swap",
        )
    raise DeploykitError(f"{model}: the process of the build ended with code {code}")


def _send_job(process: subprocess.Popen[bytes], job: object) -> None:
    if process.stdin is not None:
        with process.stdin as pipe:
            pickle.dump(job, pipe)


def _receive(process: subprocess.Popen[bytes]) -> Any:
    """The next message of our own child; None at its end."""
    try:
        return pickle.load(process.stdout) if process.stdout else None  # noqa: S301 - of `main`
    except (EOFError, pickle.UnpicklingError):
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the build as Ctrl-C does; end it if it does not stop."""
    if process.stdout is not None:
        process.stdout.close()  # a child that reports progress ends by that, too
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> None:
    """The child: a job on stdin, messages on stdout, where no library may write."""
    with os.fdopen(os.dup(1), "wb", buffering=0) as pipe:
        os.dup2(2, 1)

        def send(*message: object) -> None:
            pipe.write(pickle.dumps(message))

        try:
            model, out, options = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our parent
            found = build_here(
                model, out, options, lambda phase, share: send("progress", phase, share)
            )
            send("result", found)
        except (DeploykitError, KeyboardInterrupt, SystemExit) as exc:
            with contextlib.suppress(BrokenPipeError):
                send("error", exc)


if __name__ == "__main__":
    main()
