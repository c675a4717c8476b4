"""A folder and processes that go when this process goes, killed with SIGKILL or not.

Another process waits at a pipe whose other end this process alone holds. When that closes, it kills
every process that has the folder in its environment, in whatever session, and removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

MARK = "DK_GPU_WORK"  # in the environment of all that is started inside the block
LIMIT_S = 10  # a process that waits for a GPU's driver may outlive SIGKILL


@contextlib.contextmanager
def workplace(prefix: str) -> Iterator[Path]:
    """A folder for files of the steps, temporary ones too."""
    folder = tempfile.mkdtemp(prefix=prefix)
    words = [sys.executable, __file__, folder]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True),  # no Ctrl-C there
        patch.dict(os.environ, {MARK: folder, "TMPDIR": folder}),
        patch.object(tempfile, "tempdir", folder),  # which was read before
    ):
        yield Path(folder)


def marked(folder: str) -> list[int]:
    """The processes that were started with `folder` in their environment."""
    found, entry = [], f"{MARK}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def main(folder: str) -> None:
    sys.stdin.read()
    end = time.monotonic() + LIMIT_S
    while (left := marked(folder)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
