"""Let the process end while another thread is inside a native library.

Python ends a daemon thread when it comes back from native code, which torch and ONNX Runtime
answer with abort(); a library's destructors run while the thread is still inside, which
TensorRT for RTX 1.7 answers with a segmentation fault. So at exit no thread begins another call,
those inside get `LIMIT_S` to come out, and where one does not, no destructor runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from threading import get_ident

LIMIT_S = 2.0

_depth: dict[int, int] = {}  # thread -> how many `INSIDE` blocks it is in
_ending = False


class _Inside:
    """Stands around calls of native libraries in threads that the process does not wait for."""

    def __enter__(self) -> None:
        thread = get_ident()
        if thread in _depth:
            _depth[thread] += 1
            return
        _depth[thread] = 1
        if _ending and threading.current_thread().daemon:
            del _depth[thread]
            threading.Event().wait()  # until the process has ended

    def __exit__(self, *_: object) -> None:
        thread = get_ident()
        if _depth[thread] == 1:
            del _depth[thread]
        else:
            _depth[thread] -= 1


INSIDE = _Inside()  # `with INSIDE:`, also within another


@atexit.register
def _leave() -> None:
    global _ending
    _ending = True
    me, end_s = get_ident(), time.monotonic() + LIMIT_S
    while any(thread != me for thread in list(_depth)):
        if time.monotonic() > end_s:
            _skip_destructors()
            return
        time.sleep(0.002)  # `INSIDE` is on each call's path: an event would cost all of them


def _skip_destructors() -> None:
    """Have exit() call _exit() first, with the same code (glibc's on_exit; others lack it)."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


os.register_at_fork(after_in_child=_depth.clear)  # a child has none of these threads
