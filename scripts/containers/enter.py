"""Run a command as a hardened container would: a new root, read-only, a user without rights.

    unshare --mount --pid --fork --net --kill-child python enter.py '{"root": ..., "argv": [...]}'

Loopback is the only network. /sys is absent: under qemu-user ONNX Runtime reads it and crashes.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCSIFFLAGS, IFF_UP, PR_SET_NO_NEW_PRIVS = 0x8914, 0x1, 38
DEVICES = ("null", "zero", "full", "random", "urandom")


def main() -> None:
    box = json.loads(sys.argv[1])
    root, uid = box["root"], box["uid"]
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    mount("--make-rprivate", "/")
    mount("--bind", root, root)
    mount("-o", "remount,bind,ro", root)
    mount("-t", "tmpfs", "-o", "mode=1777,noexec,nosuid,nodev", "tmpfs", f"{root}/tmp")
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("-t", "tmpfs", "-o", "mode=755,nosuid", "tmpfs", f"{root}/dev")
    for name in DEVICES:
        Path(f"{root}/dev/{name}").touch()
        mount("--bind", f"/dev/{name}", f"{root}/dev/{name}")
    for inside, (outside, options) in box["binds"].items():
        mount("--bind", outside, f"{root}{inside}")
        mount("-o", f"remount,bind,{options}", f"{root}{inside}")
    os.chroot(root)
    os.chdir(box["cwd"])
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.execvpe(box["argv"][0], box["argv"], box["env"])


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    main()
