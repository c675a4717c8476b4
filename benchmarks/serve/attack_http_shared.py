"""Attacks on shared memory that clients have registered."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.serve.attack_http_setup import Attacked, ask, counted

FOLDER = Path("/dev/shm")
SIZE = 64 << 20


def regions(server: Attacked, what: str, name: str = "", **more: object) -> int:
    path = f"/v2/systemsharedmemory{f'/region/{name}' if name else ''}/{what}"
    body = json.dumps(more).encode() if more else b""
    return server.once(ask("GET" if what == "status" else "POST", path, body))


@contextlib.contextmanager
def file_of(name: str, size: int = SIZE) -> Iterator[Path]:
    path = FOLDER / name
    with path.open("wb") as handle:
        handle.truncate(size)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def infer_shared(model: str, shape: list[int], taken: str, size: int, given: str = "") -> bytes:
    item = {"name": "x", "datatype": "FP32", "shape": shape}
    item["parameters"] = {"shared_memory_region": taken, "shared_memory_byte_size": size}
    body: dict[str, object] = {"inputs": [item]}
    if given:
        where = {"shared_memory_region": given, "shared_memory_byte_size": SIZE}
        body["outputs"] = [{"name": "y", "parameters": where}]
    return ask("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())


def truncated_in_use(server: Attacked) -> str:
    """8 clients read and write regions whose file is truncated, grown and removed meanwhile."""
    with file_of("attacked-a") as path, file_of("attacked-b") as other:
        regions(server, "register", "a", key="/attacked-a", offset=0, byte_size=SIZE)
        regions(server, "register", "b", key="/attacked-b", offset=0, byte_size=SIZE)
        asked = infer_shared("wide", [1, 1], "a", 4, "b")

        def one(number: int) -> str | int:
            if number:
                return server.once(asked)
            for size in (0, 3, 4096, SIZE):
                for each in (path, other):
                    os.truncate(each, size)
                time.sleep(0.005)
            return "cut"

        return counted(server.together(8, one))


def unregistered_in_use(server: Attacked) -> str:
    """8 clients use regions that others unregister and register again meanwhile."""
    with file_of("attacked-a"), file_of("attacked-b"):
        asked = infer_shared("wide", [1, 1], "a", 4, "b")

        def one(number: int) -> int:
            if number > 1:
                return server.once(asked)
            name = "ab"[number]
            regions(server, "unregister", name)
            key = f"/attacked-{name}"
            return regions(server, "register", name, key=key, offset=0, byte_size=SIZE)

        found = counted(server.together(8, one))
        regions(server, "unregister")
        return found


def wrong_sizes(server: Attacked) -> str:
    """16 clients name 64 MiB of a region for an input of 16 bytes, others ask for the regions."""
    with file_of("attacked-a"):
        regions(server, "register", "a", key="/attacked-a", offset=0, byte_size=SIZE)
        asked = [
            infer_shared("m", [1, 4], "a", SIZE),
            infer_shared("m", [SIZE // 16, 4], "a", SIZE),
            ask("GET", "/v2/systemsharedmemory/status"),
        ]
        found = counted(server.together(16, lambda n: server.once(asked[n % 3])))
        regions(server, "unregister")
        return found


def odd_keys(server: Attacked) -> str:
    """8 clients register folders, links, FIFOs, devices, semaphores and paths outside."""
    made = [FOLDER / f"attacked-{kind}" for kind in ("fifo", "link", "loop", "folder")]
    os.mkfifo(made[0])
    made[1].symlink_to("/etc/passwd")
    made[2].symlink_to(made[2])
    made[3].mkdir()
    keys = [f"/{each.name}" for each in made]
    keys += ["/../etc/passwd", "/..", "/a/b", "/sem.x", "/\0", "/" + "a" * 500, "//dev/zero"]
    try:

        def one(number: int) -> int:
            key = keys[number % len(keys)]
            return regions(server, "register", f"r{number}", key=key, offset=0, byte_size=1)

        return counted(server.together(len(keys), one))
    finally:
        for each in made[:3]:
            each.unlink()
        made[3].rmdir()


def written_while_read(server: Attacked) -> str:
    """8 clients use a region that another process changes all the time, and fills with holes."""
    with file_of("attacked-a") as path, path.open("r+b") as handle:
        regions(server, "register", "a", key="/attacked-a", offset=0, byte_size=SIZE)
        asked = infer_shared("m", [32, 4], "a", 512)
        with mmap.mmap(handle.fileno(), SIZE) as view:

            def one(number: int) -> str | int:
                if number:
                    return server.once(asked)
                view[:512] = os.urandom(512)
                os.truncate(path, 1024)
                os.truncate(path, SIZE)
                return "changed"

            found = counted(server.together(8, one))
        regions(server, "unregister")
        return found


SHARED = (truncated_in_use, unregistered_in_use, wrong_sizes, odd_keys, written_while_read)
