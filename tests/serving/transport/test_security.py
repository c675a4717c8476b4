"""Token, TLS, Host and Origin, through real sockets."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from deploykit.core.errors import BadInput
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from deploykit.serving.transport import listener
from deploykit.serving.transport.connection import Limits
from deploykit.serving.transport.listener import bind, reserve, share_address
from deploykit.serving.transport.security import tls_context
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import Raw, Running, infer_json, request, running

GOOD = infer_json([1, 2, 3, 4], [1, 4])
INFER = "/v2/models/m/infer"
TOKEN = "correct horse battery"


def test_without_the_exact_token_only_health_and_the_page_itself_answer() -> None:
    targets = "/v2 /v2/models/m /metrics /status /docs /openapi.json /v2/healthy /v2/models/unknown"
    asked = [("GET", target, b"") for target in targets.split()]
    asked += [("POST", INFER, GOOD), ("POST", "/v2/repository/index", b"")]
    wrong = ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xff")
    with running(token=TOKEN) as server:
        for target in ("/v2/health/live", "/v2/health/ready", "/"):
            assert server.ask("GET", target).status == 200
        for method, target, body in asked:
            for headers in ({}, {"Authorization": "Bearer wrong token indeed"}):
                reply = server.ask(method, target, body, **headers)
                assert reply.status == 401, target
                assert reply.headers["www-authenticate"] == "Bearer"
                assert TOKEN not in reply.body.decode()
        for header in wrong:
            assert server.ask("GET", "/v2", Authorization=header).status == 401, header
        raw = server.connect()  # refused before its body
        head = request("POST", INFER, Content_Length="60000000", Expect="100-continue")
        assert raw.ask(head).status == 401
        assert raw.ended()
        for header in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
            assert server.ask("POST", INFER, GOOD, Authorization=header).status == 200


# -- Host and Origin (W1, W2)


def test_a_foreign_origin_gets_403_for_every_method_and_a_loopback_origin_is_allowed(
    server: Running,
) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
            reply = server.ask(method, INFER, Origin=origin)
            assert reply.status == 403
            assert "access-control-allow-origin" not in reply.headers
    for origin in ("http://localhost:3000", f"http://127.0.0.1:{server.port}"):
        reply = server.ask("POST", INFER, GOOD, Origin=origin)
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == origin
        assert reply.headers["vary"] == "Origin"


def test_an_allowed_origin_may_call_a_server_on_any_address() -> None:
    origin = "https://app.example"
    app = "vscode-webview://0ab"  # whose pages have a scheme of their own
    with running(host="0.0.0.0", origins=(origin, app), token=TOKEN) as server:
        # the browser's preflight request has no token
        first = server.ask(
            "OPTIONS",
            INFER,
            Host="gpu.example",
            Origin=origin,
            Access_Control_Request_Method="POST",
            Access_Control_Request_Headers="authorization,tracestate,x-b3-traceid",
            Access_Control_Request_Private_Network="true",
        )
        assert first.status == 200
        assert first.headers["access-control-allow-origin"] == origin
        assert "POST" in first.headers["access-control-allow-methods"]
        asked = "authorization,tracestate,x-b3-traceid"
        assert first.headers["access-control-allow-headers"] == asked
        assert first.headers["access-control-allow-credentials"] == "true"
        assert first.headers["access-control-allow-private-network"] == "true"
        headers = {"Host": "gpu.example", "Authorization": f"Bearer {TOKEN}"}
        assert server.ask("POST", INFER, GOOD, Origin=origin, **headers).status == 200
        refused = server.ask("POST", INFER, GOOD, Origin=origin, Host="gpu.example")
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == origin  # the page may read why
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            reply = server.ask(method, INFER, GOOD, Origin="https://evil.example", **headers)
            assert reply.status == 403
            assert "access-control-allow-origin" not in reply.headers
        for own, status in (("http://gpu.example", 200), (app, 200), (app[:-1], 403)):
            assert server.ask("POST", INFER, GOOD, Origin=own, **headers).status == status


LOCAL = "127.0.0.1"
OWN = "LocalHost localhost: app.localhost:3000 127.1.2.3:80 [::1]:8000 [0:0:0:0:0:0:0:1]"
OWN += " [::ffff:127.0.0.1]:1"
FOREIGN = "dk localhost. 127.0.0.1. localhost:a a@localhost notlocalhost 127.1 2130706433 ::1 [::1"
FOREIGN += " 127.0.0.1.evil.example evil.example [::ffff:8.8.8.8] 8.8.8.8 [localhost]"
HOSTS = {  # address, allowed hosts: those that are answered, and those that are not
    (LOCAL, ()): (OWN, FOREIGN),
    (LOCAL, ("dk",)): ("dk DK:8080 localhost dk.:", "dk.evil.example"),
    (LOCAL, ("dk:80",)): ("dk:80", "dk:81"),
    (LOCAL, ("*.example.org",)): ("a.b.example.org:443", "evilexample.org"),
    (LOCAL, ("*.example.org:8443",)): ("a.example.org:8443", "a.example.org:8444"),
    (LOCAL, ("*",)): ("anything", ""),
    ("0.0.0.0", ()): ("anything", ""),
    ("0.0.0.0", ("dk",)): ("dk", "evil.example"),
}


@pytest.mark.parametrize(("address", "allowed"), HOSTS, ids=str)
def test_a_server_answers_for_its_own_hosts_and_those_that_are_allowed(
    address: str, allowed: tuple[str, ...]
) -> None:
    """Each proxy that passes on the host of its clients got 403."""
    answered, refused = (hosts.split() for hosts in HOSTS[address, allowed])
    with running(host=address, allowed_hosts=allowed) as server:
        for host in (*answered, *refused):
            status = 200 if host in answered else 403
            reply = server.ask("GET", "/v2", Host=host)
            assert reply.status == status, host
            own = server.ask("POST", INFER, GOOD, Host=host, Origin=f"https://{host}")
            assert own.status == status  # the dashboard, by the same proxy
            if status == 403:
                assert "`allowed_hosts`" in reply.json["error"]
            probe = server.ask("GET", "/v2/health/ready", Host=host)
            assert probe.status == (status if address == LOCAL else 200)  # a cluster's check


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("origins", each) for each in ("app.example", "*", "https://a/b", "https://", "null")),
        *(("allowed_hosts", each) for each in ("a b", "http://a", "a/b", "")),
    ],
)
def test_an_invalid_origin_or_host_is_refused_at_start(option: str, value: str) -> None:
    with pytest.raises(BadInput, match=f"`{option}`"):
        Server({"m": FakeEngine()}, ServeOptions(http_port=0, **{option: (value,)}))


def test_listening_beyond_loopback_logs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for options, words in (
        ({}, ""),
        ({"host": "0.0.0.0"}, "0.0.0.0"),
        ({"host": "0.0.0.0", "token": TOKEN}, "without TLS"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "deploykit"), running(**options):
            pass
        lines = [each.message for each in caplog.records if "listening" in each.message]
        assert len(lines) == bool(options)
        assert words in "".join(lines)


# -- TLS


def secure(port: int, cert: Path | None, own: tuple[Path, Path] | None = None) -> Raw:
    """Connect, and check the server's certificate if it is given; show our `own`."""
    context = ssl._create_unverified_context() if cert is None else ssl.create_default_context()
    if cert is not None:
        context.load_verify_locations(cert)
    if own is not None:
        context.load_cert_chain(*own)
    raw = Raw(port)
    raw.socket = context.wrap_socket(raw.socket, server_hostname="localhost")
    raw._stream = raw.socket.makefile("rb")
    return raw


def test_tls_carries_many_requests_and_large_bodies(pem: tuple[Path, Path]) -> None:
    cert, key = pem
    with running(tls_cert=cert, tls_key=key, token=TOKEN) as server:
        raw = secure(server.port, cert)
        header = {"Authorization": f"Bearer {TOKEN}"}
        for padding in (0, 10, 3_000_000):
            reply = raw.ask(request("POST", INFER, GOOD + b" " * padding, **header))
            assert reply.json["outputs"][0]["data"] == [3, 5, 7, 9]
        raw.close()
    context = tls_context(ServeOptions(tls_cert=cert, tls_key=key), "http/1.1")
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_what_is_no_tls_handshake_is_closed_with_one_log_line(
    pem: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = pem
    caplog.set_level(logging.INFO, "deploykit")
    limits = Limits(header_s=0.2)
    with running(None, limits, tls_cert=cert, tls_key=key) as server:
        plain, silent, half = (server.connect() for _ in range(3))
        plain.send(request("GET", "/v2/health/live"))
        half.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert b"200 OK" not in plain.socket.recv(4096)
        assert silent.ended()
        assert half.ended()
        with closing(secure(server.port, cert)) as again:
            assert again.ask(request("GET", "/v2/health/live")).status == 200
    lines = [r.message for r in caplog.records if "handshake" in r.message]
    assert lines[0] == "a connection was closed in its TLS handshake: http request"
    assert len(lines) == 3


def test_clients_without_a_tls_hello_make_room_for_others(
    pem: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 silent connections kept all others out, health checks too, for 10 s."""
    cert, key = pem
    monkeypatch.setattr(listener, "SPARE", 1)
    with running(None, Limits(connections=2, header_s=600), tls_cert=cert, tls_key=key) as server:
        silent = [server.connect() for _ in range(6)]
        client = secure(server.port, cert)
        reply = client.ask(request("GET", "/v2/health/live"))
        assert reply.status == 200
        assert all(raw.ended() for raw in silent[:3])
        client.close()


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def test_a_wrong_certificate_is_named(pem: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = pem
    other, locked, absent, text, torn = (tmp_path / f"{name}.pem" for name in "olatx")
    openssl("genrsa", "-out", other, "2048")
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked)
    text.write_text("hello")
    torn.write_text(cert.read_text()[:200])
    for files, message in (
        ((absent, key), f"{absent}: no such file"),
        ((cert, absent), f"{absent}: no such file"),
        ((text, key), f"`tls_cert` {text}"),
        ((torn, key), str(torn)),
        ((cert, other), f"`tls_cert` {cert}, `tls_key` {other}: key values mismatch"),
        ((cert, locked), f"`tls_key` {locked}: "),
        ((cert, tmp_path), f"{tmp_path}: is a folder"),
    ):
        options = ServeOptions(http_port=0, tls_cert=files[0], tls_key=files[1])
        with pytest.raises(BadInput) as caught:
            Server({"m": FakeEngine()}, options)
        assert message in caught.value.message
        assert "\n" not in caught.value.message


def serial_of(port: int) -> str:
    """The serial number of the certificate that the server shows now."""
    data = ssl.get_server_certificate(("127.0.0.1", port))
    command = ["openssl", "x509", "-noout", "-serial"]
    return subprocess.run(command, input=data, capture_output=True, text=True, check=True).stdout


def issue(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """A new certificate for localhost, signed by itself or as `more` says, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    command = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}")
    openssl(*command, "-keyout", key, "-out", cert, *more)
    return cert, key


def test_a_new_certificate_and_a_new_token_are_used_without_a_restart(
    tmp_path: Path, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    cert, key = issue(tmp_path, "localhost")
    other_cert, other_key = issue(tmp_path, "other")
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    options = {"tls_cert": cert, "tls_key": key, "token_file": secret}
    with running(grpc_port=0, **options) as server:

        def status(token: str) -> int:
            raw = secure(server.port, None)
            found = raw.ask(request("GET", "/v2", Authorization=f"Bearer {token}")).status
            raw.close()
            return found

        before = serial_of(server.port)
        other_cert.replace(cert)  # it does not fit the key yet: the old one stays in use
        secret.write_text("short")
        server.pass_time(1)
        assert (serial_of(server.port), status(TOKEN)) == (before, 200)
        other_key.replace(key)
        secret.write_text("another correct horse\n")
        eventually(lambda: status("another correct horse") == 200)
        assert status(TOKEN) == 401
        eventually(lambda: serial_of(server.port) != before)
        assert server.server.grpc_port is not None
        assert serial_of(server.server.grpc_port) == serial_of(server.port)


def test_a_token_that_changes_while_models_are_opened_is_the_new_one(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    options = ServeOptions(http_port=0, token_file=secret)
    secret.write_text("another correct horse\n")
    server = Running(Server({"m": FakeEngine()}, options))
    assert server.ask("GET", "/v2", Authorization=f"Bearer {TOKEN}").status == 401
    assert server.ask("GET", "/v2", Authorization="Bearer another correct horse").status == 200
    server.close()


def test_only_clients_with_a_certificate_of_the_ca_may_connect(tmp_path: Path) -> None:
    cert, key = issue(tmp_path, "localhost")
    authority, secret = issue(tmp_path, "authority")
    known = issue(tmp_path, "known", "-CA", str(authority), "-CAkey", str(secret))
    stranger = issue(tmp_path, "stranger")
    live = request("GET", "/v2/health/live")
    with running(tls_cert=cert, tls_key=key, tls_client_ca=authority) as server:
        for pair in (None, stranger):
            with closing(secure(server.port, None, pair)) as raw, pytest.raises(OSError):
                raw.ask(live)
        raw = secure(server.port, None, known)
        assert raw.ask(live).status == 200
        raw.close()
    with pytest.raises(BadInput, match="`tls_client_ca` needs"):
        ServeOptions(tls_client_ca=authority)


# -- The address that several workers share, and no other server


HERE = "127.0.0.1"


@pytest.mark.parametrize("start", [reserve, bind])
def test_a_port_is_in_use_before_its_workers_listen(
    start: Callable[[str, int, str], socket.socket],
) -> None:
    """Two servers that opened their models at the same time shared one, and both were ready."""
    with ExitStack() as stack:
        first = stack.enter_context(reserve(HERE, 0, "`http_port`"))
        port = first.getsockname()[1]
        with pytest.raises(BadInput, match=f"`http_port` {port}: already in use on {HERE}"):
            start(HERE, port, "`http_port`")
        for _ in range(2):
            stack.enter_context(share_address(first)).listen()


def test_a_port_whose_last_connections_are_closing_is_free() -> None:
    """Those that a server alone has closed: they are in TIME_WAIT for a minute."""
    with bind(HERE, 0) as alone:
        address = alone.getsockname()
        with socket.create_connection(address) as client:
            alone.setblocking(True)
            alone.accept()[0].close()
            assert client.recv(1) == b""
    with reserve(*address, "`http_port`") as found, share_address(found) as worker:
        worker.listen()


@pytest.mark.parametrize("name", ["", "model.onnx"])
def test_a_file_or_folder_at_the_path_of_a_socket_is_not_called_in_use(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"kept")
    with pytest.raises(BadInput, match=f"{tmp_path / name}: is not a socket"):
        bind(f"unix:{tmp_path / name}", 0)
    assert (tmp_path / "model.onnx").read_bytes() == b"kept"
