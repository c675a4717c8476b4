"""`dk.client(url).predict(...)` against a real server, and one client in several threads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.errors import DeploykitError, Expired, TooLarge
from tests.support.fake_engine import FakeEngine
from tests.support.installed import needs
from tests.support.serving.faults import until
from tests.support.serving.running import WAIT_S, Running, running

needs("PIL", "tokenizers")

from PIL import Image  # noqa: E402

from deploykit.evaluation.verify import open_proven  # noqa: E402
from deploykit.serving.client import health  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402

TOKEN = "a token of 16 or more"
IMAGES = {
    label: encoded(np.full((32, 48, 3), level, np.uint8))
    for label, level in {"dark": 0, "light": 255}.items()
}
DARK, LIGHT = IMAGES.values()
LABELS = list(IMAGES)
THREADS = 6


def opened(folder: Path, kind: str) -> Any:
    return open_proven(write_task_model(folder, kind), threads=1)[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("client")
    models = {kind: opened(folder, kind) for kind in ("classify", "segment", "text-classify")}
    with running({**models, "plain": FakeEngine()}, max_body_bytes=1_000_000) as found:
        yield found


@pytest.fixture
def client(served: Running) -> Iterator[dk.ModelClient]:
    with dk.client(url(served)) as found:
        yield found


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    return opened(tmp_path, "classify")


def url(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_the_only_model_is_asked_with_a_path_bytes_or_an_image(tmp_path: Path, engine: Any) -> None:
    (tmp_path / "cat.png").write_bytes(LIGHT)
    image = Image.fromarray(np.full((32, 48, 3), 255, np.uint8))
    with running({"m": engine}, token=TOKEN) as server:
        with dk.client(url(server), token=f"{TOKEN}\n") as client:  # as its file ends
            for item in (tmp_path / "cat.png", str(tmp_path / "cat.png"), LIGHT, image):
                assert client.predict(item)["label"] == "light"
            assert client.predict(image.convert("CMYK"))["label"] == "light"
        refused = pytest.raises(dk.BadInput, match="a token is needed")
        with dk.client(url(server)) as client, refused:
            client.predict(LIGHT)


def test_items_are_answered_however_many(client: dk.ModelClient) -> None:
    assert client.predict([], "classify") == []
    assert [each["label"] for each in client.predict([DARK], "classify")] == ["dark"]
    found = client.predict([LIGHT] * 100 + [DARK] * 40, "classify")
    assert [each["label"] for each in found] == ["light"] * 100 + ["dark"] * 40
    assert client.predict("good good good", "text-classify")["label"] == "good"
    found = client.predict(["good good good", b"bad"], "text-classify")
    assert [each["label"] for each in found] == ["good", "bad"]
    assert set(client.predict(LIGHT, "segment", mask="png")) == {"png", "width", "height"}


@pytest.mark.parametrize(
    ("item", "model", "kind", "reason"),
    [
        (b"?", "classify", dk.BadInput, "the image: is not a readable image"),
        ("absent.jpg", "classify", dk.NotFound, "absent.jpg: no such file"),
        (5, "classify", dk.BadInput, "the item is a int"),
        (Image.new("I;16", (4, 4)), "classify", dk.BadInput, "more than 8 bits per channel (I;16)"),
        (LIGHT, "absent", dk.NotFound, "there is no model 'absent'"),
        (LIGHT, "plain", dk.Unsupported, "has no task"),
        (LIGHT, None, dk.BadInput, "serves classify, segment, text-classify, plain: `model`"),
        (bytes(1_100_000), "classify", TooLarge, "the body is above 1000000 bytes"),
        (LIGHT, "../classify", dk.NotFound, "there is no model"),
    ],
)
def test_what_goes_wrong_is_one_of_the_errors_of_deploykit(
    client: dk.ModelClient, item: Any, model: str | None, kind: type[DeploykitError], reason: str
) -> None:
    with pytest.raises(kind) as caught:
        client.predict(item, model)
    assert reason in caught.value.message
    assert client.predict(LIGHT, "classify")["label"] == "light"  # the connection after it, too


def test_an_option_that_does_not_exist_is_an_error(client: dk.ModelClient) -> None:
    options: dict[str, Any] = {"topk": 1}
    with pytest.raises(TypeError, match="topk"):
        client.predict(LIGHT, "classify", **options)


def test_the_port_of_grpc_is_named_on_a_terminal(tmp_path: Path) -> None:
    model = write_task_model(tmp_path, "classify")
    with dk.serve(model, http_port=0, grpc_port=0) as server:
        address = f"http://{server.grpc_url}"
        with dk.client(address) as client, pytest.raises(dk.NotFound) as caught:
            client.predict(LIGHT)
        with pytest.raises(dk.GateFailed) as unhealthy:
            health(address)
    for each in (caught, unhealthy):
        assert "gRPC only" in each.value.message
        assert each.value.message.isprintable()


def test_nobody_there_and_nobody_answering() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with dk.client(address) as client, pytest.raises(dk.NotFound, match="no server answers"):
            client.predict(LIGHT)
        listening.listen()
        with dk.client(address, timeout_s=0.05) as client, pytest.raises(Expired, match=r"0\.05 s"):
            client.predict(LIGHT)


def test_a_server_may_be_below_a_path_of_a_proxy(engine: Any) -> None:
    with running({"m": engine}, root_path="/models") as server:
        for path in ("/models", "/models/"):
            health(url(server) + path)
            with dk.client(url(server) + path) as client:
                assert client.predict(LIGHT)["label"] == "light"


def test_a_server_and_its_client_may_want_certificates(
    served: Running, tmp_path: Path, pem: tuple[Path, Path], engine: Any
) -> None:
    cert, key = pem
    (tmp_path / "both.pem").write_text(cert.read_text() + key.read_text())
    with running({"m": engine}, tls_cert=cert, tls_key=key, tls_client_ca=cert) as server:
        address = f"https://localhost:{server.port}"
        for own in ({"cert": cert, "key": key}, {"cert": tmp_path / "both.pem"}):
            with dk.client(address, ca=cert, **own) as client:
                assert client.predict(LIGHT)["label"] == "light"
        for files, message, hint in (
            ({}, "its certificate is not trusted", "dk.client(url, ca="),
            ({"ca": cert}, "", "dk.client(url, cert="),
        ):
            with dk.client(address, **files) as client, pytest.raises(DeploykitError) as caught:
                client.predict(LIGHT)
            assert message in caught.value.message
            assert hint in (caught.value.hint or "")
    secure = url(served).replace("http:", "https:")
    with dk.client(secure) as client, pytest.raises(dk.BadInput, match="no TLS connection"):
        client.predict(LIGHT)


def test_arguments_that_cannot_be_used_are_refused(tmp_path: Path, pem: tuple[Path, Path]) -> None:
    cert, key = pem
    secure, locked = "https://localhost", tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:word"]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("127.0.0.1:8000", {}, "is not a server's URL"),
        ("http://me:secret@127.0.0.1:8000", {}, "is not a server's URL"),
        ("http://127.0.0.1:8000/?token=secret", {}, "is not a server's URL"),
        ("http://localhost", {"token": "a\nb"}, "`token`"),
        (secure, {"ca": tmp_path / "absent.pem"}, r"`ca` .*absent.pem: holds no certificate"),
        (secure, {"cert": cert, "key": locked}, "locked.pem: no certificate and its key"),
        (secure, {"cert": cert}, "`cert`"),
        (secure, {"cert": tmp_path / "absent.pem"}, "absent.pem"),
        (secure, {"key": key}, "`cert` None, `key`"),
        ("http://localhost", {"ca": cert}, "`ca` is for https://"),
        ("unix:/run/models.sock", {"cert": cert}, "`cert` is for https://"),
    ]
    for where, options, message in cases:
        with pytest.raises(dk.BadInput, match=message) as caught:
            dk.client(where, **options)
        assert "secret" not in str(caught.value)


def test_a_server_may_listen_at_a_path(tmp_path: Path, engine: Any) -> None:
    where = f"unix:{tmp_path}/models.sock"
    with running({"m": engine}, host=where), dk.client(where) as client:
        assert client.predict(LIGHT)["label"] == "light"
    with dk.client(where) as client, pytest.raises(dk.NotFound, match="no server answers"):
        client.predict(LIGHT)


# -- One client in several threads and processes


class Gated:
    """An engine that waits in each call until the gate is open."""

    steady = False  # else the server may call it on its event loop, which then accepts nothing

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, feeds: Any) -> Any:
        assert self.gate.wait(WAIT_S)
        return self.engine(feeds)


@pytest.fixture
def gate(engine: Any) -> Iterator[tuple[Running, Gated]]:
    gated = Gated(engine)
    with running({"m": gated}) as server:
        yield server, gated
        gated.gate.set()


def connections(server: Running) -> int:
    return len(server.server._listener.connections)


def answer(client: dk.ModelClient, label: str) -> str:
    found: str = client.predict(IMAGES[label])["label"]
    return found


def test_each_thread_gets_its_own_answers(gate: tuple[Running, Gated]) -> None:
    labels = LABELS * 100
    with dk.client(url(gate[0])) as client, ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(lambda label: answer(client, label), labels)) == labels


FORK = """
import os, sys
import deploykit as dk

url, *files = sys.argv[1:]
with dk.client(url) as client:
    client.predict(files[0])
    child = os.fork()
    file, label = (files[1], "light") if child else (files[0], "dark")
    wrong = sum(client.predict(file)["label"] != label for _ in range(100))
if child == 0:
    os._exit(wrong)
print(wrong, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it cannot fork")
def test_a_forked_process_and_its_parent_get_their_own_answers(
    gate: tuple[Running, Gated], tmp_path: Path
) -> None:
    files = [tmp_path / f"{label}.png" for label in LABELS]
    for file in files:
        file.write_bytes(IMAGES[file.stem])
    command = [sys.executable, "-c", FORK, url(gate[0]), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.stdout, done.stderr) == ("0 0\n", "")


@pytest.mark.parametrize("in_use", [False, True], ids=["idle", "in use"])
def test_a_closed_client_leaves_no_connection_of_any_thread(
    gate: tuple[Running, Gated], in_use: bool
) -> None:
    """One in use is closed after its answer."""
    server, engine = gate
    labels, client = LABELS * (THREADS // 2), dk.client(url(server))
    with ThreadPoolExecutor(THREADS) as pool:
        assert answer(client, "dark") == "dark"
        engine.gate.clear()
        waiting = [pool.submit(answer, client, label) for label in labels]
        until(lambda: connections(server) == THREADS)
        if in_use:
            client.close()
        engine.gate.set()
        assert [each.result() for each in waiting] == labels
        if not in_use:
            assert connections(server) == THREADS
            client.close()
        until(lambda: not connections(server))


def test_threads_that_end_leave_their_connection_to_the_next(gate: tuple[Running, Gated]) -> None:
    """One that the server has closed meanwhile is opened again."""
    server, _ = gate
    with dk.client(url(server)) as client:
        for label in LABELS * 3:
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(answer, client, label).result() == label
        (connection,) = server.server._listener.connections
        server.server._loop.call_soon_threadsafe(connection.close)
        until(lambda: not connections(server))
        assert answer(client, "dark") == "dark"
