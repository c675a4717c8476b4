"""`dk.client(url).predict(...)` against a real server."""

from __future__ import annotations

import http.server
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.errors import DeploykitError, Expired, TooLarge, UnknownEncoding
from tests.support.fake_engine import FakeEngine
from tests.support.installed import needs
from tests.support.serving.faults import until
from tests.support.serving.running import Running, running

needs("PIL", "tokenizers")

from PIL import Image  # noqa: E402

from deploykit.evaluation.verify import open_proven  # noqa: E402
from deploykit.serving.health import health  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402

TOKEN = "a token of 16 or more"


def plain(level: int) -> bytes:
    return encoded(np.full((32, 48, 3), level, np.uint8))


LIGHT, DARK = plain(255), plain(0)


def opened(folder: Path, kind: str) -> Any:
    return open_proven(write_task_model(folder, kind), threads=1)[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("client")
    models = {kind: opened(folder, kind) for kind in ("classify", "segment", "text-classify")}
    with running({**models, "plain": FakeEngine()}, max_body_bytes=1_000_000) as found:
        yield found


def url(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_the_only_model_is_asked_with_a_path_bytes_or_an_image(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(LIGHT)
    image = Image.fromarray(np.full((32, 48, 3), 255, np.uint8))
    with running({"m": opened(tmp_path, "classify")}, token=TOKEN) as server:
        with dk.client(url(server), token=TOKEN) as client:
            for item in (tmp_path / "cat.png", str(tmp_path / "cat.png"), LIGHT, image):
                assert client.predict(item)["label"] == "light"
            assert client.predict(image.convert("CMYK"))["label"] == "light"
        with (
            dk.client(url(server)) as client,
            pytest.raises(dk.BadInput, match="a token is needed"),
        ):
            client.predict(LIGHT)


def test_a_token_may_end_in_the_newline_of_its_file(tmp_path: Path) -> None:
    with running({"m": opened(tmp_path, "classify")}, token=TOKEN) as server:
        with dk.client(url(server), token=f"{TOKEN}\n") as client:
            assert client.predict(LIGHT)["label"] == "light"
        for wrong in ("a\nb", "tökén"):
            with pytest.raises(dk.BadInput, match="`token`"):
                dk.client(url(server), token=wrong)


def test_a_list_is_answered_with_a_list_however_long(served: Running) -> None:
    with dk.client(url(served)) as client:
        assert client.predict([], "classify") == []
        assert [each["label"] for each in client.predict([DARK], "classify")] == ["dark"]
        found = client.predict([LIGHT] * 100 + [DARK] * 40, "classify")
    assert [each["label"] for each in found] == ["light"] * 100 + ["dark"] * 40


def test_a_model_of_sentences_takes_strings(served: Running) -> None:
    with dk.client(url(served)) as client:
        assert client.predict("good good good", "text-classify")["label"] == "good"
        found = client.predict(["good good good", b"bad"], "text-classify")
        assert [each["label"] for each in found] == ["good", "bad"]


def test_a_mask_may_be_a_png(served: Running) -> None:
    with dk.client(url(served)) as client:
        assert set(client.predict(LIGHT, "segment", mask="png")) == {"png", "width", "height"}


def test_an_option_that_does_not_exist_is_an_error(served: Running) -> None:
    options: dict[str, Any] = {"topk": 1}
    with dk.client(url(served)) as client, pytest.raises(TypeError, match="topk"):
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


@pytest.mark.parametrize(
    ("item", "model", "kind", "reason"),
    [
        (b"?", "classify", dk.BadInput, "the image: is not a readable image"),
        ("absent.jpg", "classify", dk.NotFound, "absent.jpg: no such file"),
        (5, "classify", dk.BadInput, "the item is a int"),
        (Image.new("I;16", (4, 4)), "classify", dk.BadInput, "more than 8 bits per channel (I;16)"),
        (Image.new("F", (4, 4)), "classify", dk.BadInput, "more than 8 bits per channel (F)"),
        (5, "text-classify", dk.BadInput, "the item is a int"),
        (b"\xff", "text-classify", dk.BadInput, "is not UTF-8"),
        (LIGHT, "absent", dk.NotFound, "there is no model 'absent'"),
        (LIGHT, "plain", dk.Unsupported, "has no task"),
        (LIGHT, None, dk.BadInput, "serves classify, segment, text-classify, plain: `model`"),
        (bytes(1_100_000), "classify", TooLarge, "the body is above 1000000 bytes"),
        (LIGHT, "../classify", dk.NotFound, "there is no model"),
    ],
)
def test_what_goes_wrong_is_one_of_the_errors_of_deploykit(
    served: Running, item: Any, model: str | None, kind: type[DeploykitError], reason: str
) -> None:
    with dk.client(url(served)) as client, pytest.raises(kind) as caught:
        client.predict(item, model)
    assert reason in caught.value.message
    with dk.client(url(served)) as client:  # the connection after an error, too
        with pytest.raises(dk.BadInput):
            client.predict(b"?", "classify")
        assert client.predict(LIGHT, "classify")["label"] == "light"


def test_an_idle_connection_that_the_server_closed_is_opened_again(served: Running) -> None:
    with dk.client(url(served)) as client:
        assert client.predict(LIGHT, "classify")["label"] == "light"
        for connection in list(served.server._listener.connections):
            served.server._loop.call_soon_threadsafe(connection.close)
        until(lambda: not served.server._listener.connections)
        assert client.predict(DARK, "classify")["label"] == "dark"


def test_nobody_there_and_nobody_answering(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with dk.client(address) as client, pytest.raises(dk.NotFound, match="no server answers"):
            client.predict(LIGHT)
        listening.listen()
        with dk.client(address, timeout_s=0.05) as client, pytest.raises(Expired, match=r"0\.05 s"):
            client.predict(LIGHT)
    with pytest.raises(dk.BadInput, match="is not a server's URL"):
        dk.client("127.0.0.1:8000")
    for url in ("http://me:secret@127.0.0.1:8000", "http://127.0.0.1:8000/?token=secret"):
        with pytest.raises(dk.BadInput, match="is not a server's URL") as refused:
            dk.client(url)
        assert "secret" not in str(refused.value)


def test_a_server_may_be_below_a_path_of_a_proxy(served: Running) -> None:
    class Proxy(http.server.BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self.path.startswith("/models/v2/"):
                self.send_error(404)
                return
            kind = {"Content_Type": self.headers.get("Content-Type", "")}
            reply = served.ask(self.command, self.path.removeprefix("/models"), body, **kind)
            self.send_response(reply.status)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = forward  # noqa: N815 - names of http.server

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        try:
            for path in ("/models", "/models/"):
                address = f"http://127.0.0.1:{proxy.server_port}{path}"
                assert health(address).ready
                with dk.client(address) as client:
                    assert client.predict(LIGHT, "classify")["label"] == "light"
                proxy.socket.settimeout(1)
        finally:
            proxy.shutdown()
            thread.join()


def test_a_certificate_is_trusted_by_its_ca_alone(
    served: Running, tmp_path: Path, pem: tuple[Path, Path]
) -> None:
    cert, key = pem
    engine = opened(tmp_path, "classify")
    with running({"m": engine}, tls_cert=cert, tls_key=key) as server:
        address = f"https://localhost:{server.port}"
        with dk.client(address, ca=cert) as client:
            assert client.predict(LIGHT)["label"] == "light"
        with dk.client(address) as client, pytest.raises(dk.BadInput) as caught:
            client.predict(LIGHT)
    assert "its certificate is not trusted" in caught.value.message
    assert "dk.client(url, ca=" in (caught.value.hint or "")
    secure = url(served).replace("http:", "https:")
    with dk.client(secure) as client, pytest.raises(dk.BadInput) as caught:
        client.predict(LIGHT)
    assert "no TLS connection" in caught.value.message
    (tmp_path / "empty.pem").write_text("")
    for wrong in ("absent.pem", "empty.pem"):
        with pytest.raises(dk.BadInput, match=rf"`ca` .*{wrong}: holds no certificate"):
            dk.client(address, ca=tmp_path / wrong)


def test_a_server_may_want_a_certificate_of_the_client(
    tmp_path: Path, pem: tuple[Path, Path]
) -> None:
    cert, key = pem
    (tmp_path / "both.pem").write_text(cert.read_text() + key.read_text())
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:word"]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    engine = opened(tmp_path, "classify")
    with running({"m": engine}, tls_cert=cert, tls_key=key, tls_client_ca=cert) as server:
        address = f"https://localhost:{server.port}"
        for own in ({"cert": cert, "key": key}, {"cert": tmp_path / "both.pem"}):
            with dk.client(address, ca=cert, **own) as client:
                assert client.predict(LIGHT)["label"] == "light"
        with dk.client(address, ca=cert) as client, pytest.raises(DeploykitError) as caught:
            client.predict(LIGHT)
        assert "dk.client(url, cert=" in (caught.value.hint or "")
    wrong = [
        (address, {"cert": cert, "key": locked}, "locked.pem: no certificate and its key"),
        (address, {"cert": cert}, "`cert`"),
        (address, {"cert": tmp_path / "absent.pem"}, "absent.pem"),
        (address, {"key": key}, "`cert` None, `key`"),
        ("http://localhost", {"ca": cert}, "`ca` is for https://"),
        ("unix:/run/models.sock", {"cert": cert}, "`cert` is for https://"),
    ]
    for where, files, message in wrong:
        with pytest.raises(dk.BadInput, match=message):
            dk.client(where, **files)


def test_a_server_may_listen_at_a_path(tmp_path: Path) -> None:
    where = f"unix:{tmp_path}/models.sock"
    with (
        running({"m": opened(tmp_path, "classify")}, host=where),
        dk.client(where) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        found = list(pool.map(client.predict, [LIGHT, DARK] * 10))
    assert [each["label"] for each in found] == ["light", "dark"] * 10
    with dk.client(where) as client, pytest.raises(dk.NotFound, match="no server answers"):
        client.predict(LIGHT)


def test_each_status_has_its_error() -> None:
    from deploykit.serving.client import _ERRORS

    assert _ERRORS[415] is UnknownEncoding
    assert _ERRORS[400] is dk.BadInput
