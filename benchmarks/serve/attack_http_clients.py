"""Attacks of clients on the sums over all of them: memory, connections, turns of the event loop."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import random
import resource
import socket
import time
import zlib

from benchmarks.serve.attack_http_setup import (
    LARGE,
    SMALL,
    Attacked,
    answer,
    ask,
    counted,
    infer,
    reset,
    send_all,
)

INFER = "/v2/models/m/infer"
CHUNKED = ask("GET", INFER).replace(b"GET", b"POST")[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
MORE = itertools.count()


def pages_unread(server: Attacked) -> str:
    """200 clients pipeline 300 requests for /metrics, /docs and /status and do not read."""
    data = b"".join(ask("GET", each) for each in ("/metrics", "/docs", "/status")) * 100
    for _ in range(200):
        client = server.connect()
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.send(data)
    time.sleep(server.seconds)
    return "not read"


def trailers_for_ever(server: Attacked) -> str:
    """300 clients end a chunked body and send trailers without end, a line at a time."""
    clients = [server.connect() for _ in range(300)]
    send_all(clients, CHUNKED + b"2\r\n{}\r\n0\r\n")
    end_s = time.monotonic() + server.seconds
    while time.monotonic() < end_s:
        send_all(clients, b"a: " + b"b" * 2000 + b"\r\n")
        time.sleep(0.05)
    return counted(answer(each) for each in clients)


def expected_never_sent(server: Attacked) -> str:
    """400 clients announce 60 MB with Expect: 100-continue, half of them send nothing after it."""
    head = ask("GET", INFER, b"", "Expect: 100-continue", "Content-Length: 60000000")
    clients = [server.connect() for _ in range(400)]
    send_all(clients, head.replace(b"GET", b"POST"))
    send_all(clients[::2], b"[" * 100_000)
    time.sleep(server.seconds)
    return f"{sum(each.recv(25)[9:12] == b'100' for each in clients[1::2])} × 100"


def chunk_extensions(server: Attacked) -> str:
    """64 clients send chunks of one byte, each with an extension of 4,000."""
    piece = (b"1;" + b"e" * 4000 + b"\r\n[\r\n") * 16

    def one(_: int) -> int:
        return server.once(CHUNKED + piece * 200 + b"0\r\n\r\n")

    return counted(server.together(64, one))


def tiny_chunks(server: Attacked) -> str:
    """64 clients send 60,000 chunks of one byte."""
    data = CHUNKED + b"1\r\n[\r\n" * 60_000 + b"0\r\n\r\n"
    return counted(server.together(64, lambda _: server.once(data)))


def bombs_in_members(server: Attacked) -> str:
    """24 clients send gzip of 255 members, which is 60 MiB, or deflate of 64 MiB."""
    member = gzip.compress(b"[" * (240 << 10))
    bodies = [
        ask("POST", INFER, member * 255, "Content-Encoding: gzip"),
        ask("POST", INFER, zlib.compress(b"[" * (64 << 20)), "Content-Encoding: deflate"),
        ask("POST", INFER, member * 300, "Content-Encoding: gzip"),
    ]
    return counted(server.together(24, lambda number: server.once(bodies[number % 3])))


def idle_thousands(server: Attacked) -> str:
    """5,000 connections that send nothing or half a line, of which 4,096 are allowed."""
    _allow_files()
    found = []
    for number in range(5000):
        client = server.connect()
        client.sendall(b"GET /v2" if number % 2 else b"")
        found.append(client)
    time.sleep(server.seconds)
    return f"{sum(map(_closed, found)):,} closed or refused with 503"


def reset_within_answers(server: Attacked) -> str:
    """64 clients ask for 8 MiB and 16 pages, read a little and reset the connection."""

    def one(number: int) -> str:
        client = server.connect(receive_buffer=1024, kept=False)
        client.sendall(LARGE + ask("GET", "/docs") * 16)
        client.recv(1 + number * 999)
        reset(client)
        return "reset"

    return counted(server.together(64, one))


def new_heads(server: Attacked) -> str:
    """1,000 clients pipeline 16 heads that differ, with 90 headers each, at once."""
    names = "\r\n".join(f"{name}:1" for name in range(90))
    clients = [server.connect() for _ in range(1000)]
    end_s = time.monotonic() + server.seconds
    asked = 0
    while time.monotonic() < end_s:
        heads = [ask("GET", "/v2", b"", names, f"n: {next(MORE)}") for _ in range(16)]
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(b"".join(heads), socket.MSG_DONTWAIT)
                asked += 16
            with contextlib.suppress(OSError):
                client.recv(1 << 16, socket.MSG_DONTWAIT)
    return f"{asked:,} asked"


def odd_methods(server: Attacked) -> str:
    """64 clients send TRACE, CONNECT, OPTIONS, HEAD, upgrades to h2c and WebSocket, ranges."""
    upgrade = "Connection: Upgrade, HTTP2-Settings"
    asked = [
        ask("TRACE", "/v2"),
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ask("OPTIONS", "*"),
        ask("OPTIONS", INFER, b"", "Origin: http://localhost"),
        ask("HEAD", "/docs"),
        ask("GET", "/docs", b"", "Range: bytes=" + ",".join(f"{n}-" for n in range(900))),
        ask("GET", "/v2", b"", upgrade, "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
        ask("GET", "/v2", b"", "Connection: Upgrade", "Upgrade: websocket"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]
    return counted(server.together(64, lambda _: server.once(asked[next(MORE) % len(asked)])))


def smuggling(server: Attacked) -> str:
    """64 clients send two lengths, folded headers, NUL in paths, encoded slashes, two codings."""
    body = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = ask("GET", INFER).replace(b"GET", b"POST")[:-2]
    asked = [
        post + b"Content-Length: 3\r\nContent-Length: 44\r\n\r\n" + body,
        post + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + body,
        post + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + body,
        post + b"X: a\r\n folded: b\r\nContent-Length: 2\r\n\r\n{}",
        ask("GET", "/v2/models/m\0/../../etc"),
        ask("GET", "/v2%2fmodels%2Fm/..%2f..%2fetc%2fpasswd"),
        ask("GET", "/v2/models/" + "%2e" * 2000),
        ask("GET", "//v2//models//m"),
        post + b"Content-Length: +2\r\n\r\n{}",
        post + b"Content-Length: 0x2\r\n\r\n{}",
    ]
    found = server.together(64, lambda _: server.once(asked[next(MORE) % len(asked)]))
    return counted(found)


def half_closed(server: Attacked) -> str:
    """2,000 clients end their side after 16 requests; half of them read nothing."""
    clients = [server.connect(receive_buffer=1024 * (number % 2)) for number in range(2000)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(SMALL * 8 + ask("GET", "/docs") * 8)
            client.shutdown(socket.SHUT_WR)
    time.sleep(server.seconds)
    return counted(answer(each) for each in clients[::2])


def unread_ends(server: Attacked) -> str:
    """300 clients ask for the last answer with `Connection: close` and never read it."""
    data = ask("GET", "/docs") * 15 + ask("GET", "/docs", b"", "Connection: close")
    clients = [server.connect(receive_buffer=1) for _ in range(300)]
    send_all(clients, data)
    time.sleep(server.seconds)
    return "not read"


def churn(server: Attacked) -> str:
    """32 clients connect and leave: at once, after half a head, with a reset."""

    def one(number: int) -> str:
        client = server.connect(kept=False)
        if number % 3:
            client.sendall(SMALL[: number % 200])
        if number % 2:
            reset(client)
        client.close()
        return "connections"

    return counted(server.together(32, one))


def other_routes_large(server: Attacked) -> str:
    """8 clients post 30 MB of JSON to the index, to regions, and to unknown paths."""
    body = json.dumps({"ready": True, "x": [random.random()] * 1_500_000}).encode()
    paths = ["/v2/repository/index", "/v2/systemsharedmemory/region/a/register", "/v2/none"]
    asked = [ask("POST", each, body) for each in paths]
    return counted(server.together(8, lambda n: server.once(asked[n % len(asked)])))


def dropped_bodies(server: Attacked) -> str:
    """200 clients go on with a body that was refused, as fast as it is taken."""
    head = ask("GET", INFER, b"", "Content-Length: 900000000000").replace(b"GET", b"POST")
    clients = [server.connect() for _ in range(200)]
    send_all(clients, head)
    end_s, data = time.monotonic() + server.seconds, b"1" * (1 << 20)
    while time.monotonic() < end_s:
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(data, socket.MSG_DONTWAIT)
    return "dropped"


def reset_bodies(server: Attacked) -> str:
    """60 clients reset the connection at one moment, after 6 MB of a body."""
    head = ask("GET", INFER, b"", "Content-Length: 60000000").replace(b"GET", b"POST")
    end_s, rounds = time.monotonic() + server.seconds, 0
    while time.monotonic() < end_s:
        clients = [server.connect(kept=False) for _ in range(60)]
        send_all(clients, head + b"1" * 6_000_000)
        for client in clients:
            reset(client)
        rounds += 1
    return f"{rounds} × 60 resets"


def half_heads_expire(server: Attacked) -> str:
    """4,000 half heads of one moment reach their time limit."""
    _allow_files()
    clients = [server.connect() for _ in range(4000)]
    send_all(clients, b"GET /v2")
    time.sleep(12)
    return counted(answer(each) for each in clients[::10])


def unread_after_large(server: Attacked) -> str:
    """48 clients ask for 8 MiB four times and read one byte of it each 10 ms."""
    clients = [server.connect(receive_buffer=1024) for _ in range(48)]
    send_all(clients, LARGE * 4)
    end_s = time.monotonic() + server.seconds
    while time.monotonic() < end_s:
        for client in clients:
            with contextlib.suppress(OSError):
                client.recv(1, socket.MSG_DONTWAIT)
        time.sleep(0.01)
    return "hardly read"


def many_rows(server: Attacked) -> str:
    """16 clients ask for 33 rows of 8 MiB, which is above the batch, or for 32, which is not."""
    asked = [infer("wide", [[1.0]] * rows, binary=True) for rows in (33, 32)]
    return counted(server.together(16, lambda n: server.once(asked[n % 2])))


def _allow_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        data = client.recv(64)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return data == b"" or b" 503 " in data or b" 408 " in data


BODIES = (
    pages_unread,
    trailers_for_ever,
    expected_never_sent,
    chunk_extensions,
    tiny_chunks,
    bombs_in_members,
    idle_thousands,
    reset_within_answers,
    new_heads,
    odd_methods,
    smuggling,
    half_closed,
    unread_ends,
    churn,
    other_routes_large,
    dropped_bodies,
    reset_bodies,
    half_heads_expire,
    unread_after_large,
    many_rows,
)
