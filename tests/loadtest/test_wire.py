"""Answers as servers write them: status 200 without a result, HTTP, and frames of gRPC."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.engines.oip import message_from
from deploykit.loadtest.grpc import Grpc, call_of, infer_request, read_message
from deploykit.loadtest.load import load_test
from deploykit.loadtest.wire import WRONG, AnswerCheck, Http1, NotHttpError
from tests.support.measure.loads import at_least, load
from tests.support.stand_in import ANSWER, StandIn, reply

grpc = pytest.importorskip("grpc")
hpack = pytest.importorskip("hpack")

QUICK: dict[str, Any] = {"warmup_s": 0.0, "duration_s": 0.3}
Y = np.array([[0.25, -1.0]], np.float32)


# -- HTTP


def binary(
    array: np.ndarray, size: int = 0, datatype: object = "FP32", shape: object = ()
) -> bytes:
    """An answer whose head says `size`, `datatype` and `shape` of the bytes of `array`."""
    item = {"name": "y", "datatype": datatype}
    item["shape"] = list(array.shape) if shape == () else shape
    item["parameters"] = {"binary_data_size": size or array.nbytes}
    head = json.dumps({"outputs": [item]}).encode()
    return reply(200, head + array.tobytes(), f"Inference-Header-Content-Length: {len(head)}\r\n")


class Wire(Http1):
    """HTTP/1.1 of one request whose answer came; its status is in `status`."""

    status: int | None


def read(answer: bytes, check: AnswerCheck | None = None, piece: int = 1 << 20) -> Wire:
    """One answer in pieces."""
    wire = Wire([b""], check or AnswerCheck(["y"]))
    wire.request(0)
    found = [wire.feed(answer[at : at + piece]) for at in range(0, len(answer), piece)]
    assert set(found[:-1]) <= {None}
    wire.status = found[-1]
    return wire


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "200 without outputs: no message"),
        (b"<html>", "200 without outputs: <html>"),
        (b"[" * 100_000, f"200 without outputs: {'[' * 200}"),
        (b'{"error": "out of\\n memory"}', "200 without outputs: out of memory"),
        (b"{}", "200 without outputs: {}"),
        (b'{"outputs": [3]}', '200 without outputs: {"outputs": [3]}'),
        (b'{"outputs": [{"name": "z", "data": []}]}', "200 without the output y"),
        (b'{"outputs": [{"name": "y"}]}', '200 without outputs: {"outputs": [{"name": "y"}]}'),
    ],
)
def test_status_200_without_a_result_is_a_failure(body: bytes, why: str) -> None:
    wire = read(reply(200, body))
    assert (wire.status, wire.error) == (WRONG, why)


@pytest.mark.parametrize("answer", [reply(200, ANSWER), binary(Y)], ids=["JSON", "binary"])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_an_answer_in_any_pieces_is_one(answer: bytes, piece: int) -> None:
    wire = read(answer, piece=piece)
    assert (wire.status, wire.error, wire.keep) == (200, None, True)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (binary(Y, size=4), "200 with 8 bytes of tensors, not 4"),
        (binary(Y, shape=[1, 3]), "200 with 8 bytes of y, a FP32[1, 3]"),
        (binary(Y, datatype="FP64"), "200 with 8 bytes of y, a FP64[1, 2]"),
        (binary(Y, datatype="BYTES", shape=[7]), None),
        (binary(Y, datatype="NEW", shape=[7]), None),
        (binary(Y, datatype=["FP32"], shape=[7]), None),
        (binary(Y, shape=None), None),
    ],
)
def test_a_tensor_has_as_many_bytes_as_its_shape_says(answer: bytes, why: str | None) -> None:
    assert read(answer).error == why


def test_an_answer_that_begins_as_a_right_one_is_still_looked_at() -> None:
    """The head of the right one is remembered."""
    check, right = AnswerCheck(["y"]), binary(Y)
    assert [read(right, check).error for _ in range(2)] == [None, None]
    size = int(right.split(b"\r\nContent-Length: ")[1].split(b"\r\n")[0])
    cut = right[:-4].replace(
        b"\r\nContent-Length: %d" % size, b"\r\nContent-Length: %d" % (size - 4)
    )
    assert read(cut, check).error == "200 with 4 bytes of tensors, not 8"


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (Y + np.float32(1e-5), None),
        (Y * 2, "a wrong answer: y differs by more than 0.001"),
        (np.full_like(Y, np.nan), "a wrong answer: y differs by more than 0.001"),
        (Y.T, "an answer whose y, FP32[2, 1], is no float32[1, 2]"),
    ],
)
def test_answers_are_compared_with_those_expected(got: np.ndarray, why: str | None) -> None:
    check = AnswerCheck(["y"], [{"y": Y}], 1e-3)
    for _ in range(2):
        assert read(binary(got), check).error == why
    data = {"name": "y", "datatype": "FP32", "shape": list(got.shape)}
    text = json.dumps({"outputs": [{**data, "data": got.ravel().tolist()}]}).encode()
    assert read(reply(200, text), check).error == why


def test_chunks_and_a_continue_are_read() -> None:
    body = json.dumps(ANSWER).encode()
    parts = (5, body[:5], len(body) - 5, body[5:])
    chunks = b"%x;ext\r\n%s\r\n%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % parts
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    for piece, early in ((1, 1), (1 << 20, 2000)):
        interim = b"HTTP/1.1 100 Continue\r\n\r\n" * early
        assert read(interim + head + chunks, piece=piece).error is None


@pytest.mark.parametrize(
    ("head", "more", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"", False),
        (b"HTTP/1.0 200 OK\r\n", b"", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", b"", True),
        (b"HTTP/1.1 200\r\n", b"", True),
        (b"HTTP/1.1 200\r\n", b"HTTP", False),  # what comes behind an answer ends it
    ],
)
def test_whether_a_connection_goes_on(head: bytes, more: bytes, keep: bool) -> None:
    body = json.dumps(ANSWER).encode()
    wire = read(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body + more))
    assert (wire.status, wire.keep) == (200, keep)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\nContent-Length: %s" % (b"9" * 5000),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999",
        b"HTTP/1.0 200 OK",  # up to the end of the connection
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n",
        b"HTTP/1.1 200 OK" + b"\r\nx: y" * 20_000,
    ],
)
def test_what_is_no_http_is_refused(answer: bytes) -> None:
    with pytest.raises(NotHttpError):
        read(answer + b"\r\n\r\n", piece=5000)


# -- gRPC


def encode(message: str, **values: Any) -> bytes:
    return message_from(message, values).SerializeToString()


def answer(array: np.ndarray = Y, name: str = "y") -> bytes:
    output = {"name": name, "datatype": "FP32", "shape": list(array.shape)}
    response = message_from("ModelInferResponse", {"model_name": "m", "outputs": [output]})
    response.raw_output_contents.append(array.tobytes())  # type: ignore[attr-defined]
    return response.SerializeToString()


INDEX = encode("RepositoryIndexResponse", models=[{"name": "m"}])


@contextmanager
def serving(
    infer: Callable[[bytes, Any], bytes] = lambda _request, _context: answer(),
    index: Callable[[bytes, Any], bytes] = lambda _request, _context: INDEX,
    options: Sequence[tuple[str, int]] = (),
) -> Iterator[str]:
    """A server of grpcio's with the methods that a load test calls; yields its URL."""
    inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    outputs = [{"name": "y", "datatype": "FP32", "shape": [1, 2]}]
    about = {"platform": "native", "inputs": inputs, "outputs": outputs}

    def describe(request: bytes, context: Any) -> bytes:
        if request != encode("ModelMetadataRequest", name="m"):
            context.abort(grpc.StatusCode.NOT_FOUND, "no such model: 50 %")
        return encode("ModelMetadataResponse", name="m", **about)

    server_metadata = encode("ServerMetadataResponse", name="native", version="7")
    methods = {
        "ModelInfer": infer,
        "RepositoryIndex": index,
        "ModelMetadata": describe,
        "ServerMetadata": lambda _request, _context: server_metadata,
    }
    handlers = {name: grpc.unary_unary_rpc_method_handler(each) for name, each in methods.items()}
    unlimited = [(f"grpc.max_{way}_message_length", -1) for way in ("receive", "send")]
    server = grpc.server(ThreadPoolExecutor(4), options=[*unlimited, *options])
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_a_server_that_ends_old_connections_loses_no_call() -> None:
    age = [("grpc.max_connection_age_ms", 60), ("grpc.max_connection_age_grace_ms", 5000)]
    with serving(options=age) as url:
        result = load(url, enough=at_least(20), concurrency=3, warmup_s=0.0, duration_s=0.6)
    assert result.ok == result.sent >= 20, result.errors


def test_requests_are_the_protocol_s_for_its_own_client() -> None:
    service = pytest.importorskip("tritonclient.grpc.service_pb2")
    x, ids = np.arange(6, dtype="<f4").reshape(2, 3), np.arange(300, dtype="<i8").reshape(1, 300)
    tensors = [("x", "FP32", x), ("ids", "INT64", ids)]
    response = service.ModelInferResponse(model_name="m", id="7")
    response.outputs.add(name="y", datatype="FP32", shape=[1, 2])
    for raw in (True, False):
        sent = infer_request("m", tensors, raw=raw)[5:]
        request = service.ModelInferRequest.FromString(sent)
        assert request.model_name == "m"
        assert [(each.name, each.datatype, list(each.shape)) for each in request.inputs] == [
            ("x", "FP32", [2, 3]),
            ("ids", "INT64", [1, 300]),
        ]
        if raw:
            assert list(request.raw_input_contents) == [x.tobytes(), ids.tobytes()]
            response.raw_output_contents.append(Y.tobytes())
        else:
            assert list(request.inputs[0].contents.fp32_contents) == x.ravel().tolist()
            assert list(request.inputs[1].contents.int64_contents) == ids.ravel().tolist()
            del response.raw_output_contents[:]
            response.outputs[0].contents.fp32_contents.extend(Y.ravel())
        outputs, head_bytes = read_message(response.SerializeToString())
        values = Y.tobytes() if raw else Y.ravel().tolist()
        assert outputs == [("y", "FP32", [1, 2], values)]
        assert not raw or head_bytes == response.ByteSize() - Y.nbytes - 2


@pytest.mark.parametrize("typed", [False, True])
def test_a_server_that_takes_or_gives_typed_contents_is_loaded(typed: bool) -> None:
    """KServe's and MLServer's give them, and some servers take nothing else."""
    output = {"name": "y", "datatype": "FP32", "shape": [1, 2]}
    output["contents"] = {"fp32_contents": Y.ravel().tolist()}

    def infer(request: bytes, context: Any) -> bytes:
        sent: Any = message_from("ModelInferRequest", {})
        sent.MergeFromString(request)
        if typed and sent.raw_input_contents:
            context.abort(grpc.StatusCode.INTERNAL, "list index out of range")
        good = not typed or len(sent.inputs[0].contents.fp32_contents) == 3
        return encode("ModelInferResponse", model_name="m", outputs=[output] if good else [])

    with serving(infer) as url:
        result = load(url, concurrency=2, **QUICK)
    assert result.ok == result.sent > 0, result.errors
    assert ("typed contents" in " ".join(result.notes)) == typed


def abort(code: str, message: str) -> Callable[[bytes, Any], bytes]:
    def refuse(_request: bytes, context: Any) -> bytes:
        context.abort(getattr(grpc.StatusCode, code), message)
        return b""

    return refuse


def test_what_is_no_server_of_the_protocol_is_named() -> None:
    with serving(abort("INVALID_ARGUMENT", "batch 64 is above 8")) as url:
        with pytest.raises(BadInput, match="gRPC 3: batch 64 is above 8"):
            load_test(url, batch=64, concurrency=1)
        with pytest.raises(NotFound, match="no model 'other'"):
            load_test(url, model="other", concurrency=1)
    with serving(index=abort("UNIMPLEMENTED", "no index")) as url:
        with pytest.raises(BadInput, match="does not list its models"):
            load_test(url, concurrency=1)
        with pytest.raises(NotFound, match="no such model: 50 %"):
            load_test(url, model="other", concurrency=1)
        assert load(url, model="m", concurrency=1, **QUICK).ok > 0
    with StandIn().running() as url, pytest.raises(BadInput, match="over gRPC"):
        load_test(url.replace("http", "grpc"), concurrency=1)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


HEAD = b"\x88"  # :status 200
STATUS = b"\x00\x0bgrpc-status"
WITHOUT = "an answer without a gRPC status (HTTP status 200)"


def whole(message: bytes, code: bytes = b"0", stream: int = 1) -> bytes:
    data, block = call_of(message), hpack.Encoder().encode([(b"grpc-status", code)], huffman=False)
    return (
        frame(4, 0, 0, struct.pack(">HI", 5, 1 << 14))
        + frame(6, 0, 0, b"12345678")
        + frame(1, 4, stream, HEAD)
        + frame(0, 8, stream, b"\x03" + data[:7] + b"\0\0\0")  # padded
        + frame(0, 0, stream, data[7:])
        + frame(1, 1, stream, block[:12])
        + frame(9, 4, stream, block[12:])
    )


@pytest.mark.parametrize("piece", [1, 10, 1 << 20])
def test_an_answer_in_any_frames_is_one(piece: int) -> None:
    wire = Grpc([call_of(b"x")], AnswerCheck(["y"], [{"y": Y}], 1e-3), b"")
    for stream, got, status in ((1, Y, 200), (3, Y * 2, WRONG), (5, Y, 200)):
        assert frame(0, 1, stream, call_of(b"x")) in wire.request(0)
        data = whole(answer(got), stream=stream)
        found = [wire.feed(data[at : at + piece]) for at in range(0, len(data), piece)]
        assert set(found[:-1]) <= {None}
        assert (found[-1], wire.keep) == (status, True)
    assert wire.error is None
    assert frame(4, 1, 0) in wire.control
    assert frame(6, 1, 0, b"12345678") in wire.control


def called() -> Grpc:
    """With one call in flight."""
    wire = Grpc([call_of(b"x")], AnswerCheck(["y"]), b"")
    wire.request(0)
    return wire


@pytest.mark.parametrize(
    ("data", "status", "error"),
    [
        *(
            (whole(answer(), b"%d" % code), status, f"gRPC {code}:")
            for code, status in {4: 504, 7: 403, 8: 429, 14: 503}.items()
        ),
        (whole(b"", b"16") + frame(3, 0, 1, bytes(4)), 401, "gRPC 16:"),  # and the rest is unread
        (whole(b""), WRONG, "200 without the output y"),
        (whole(b"\xff\xff"), WRONG, "an answer that is not a ModelInferResponse"),
        (whole(answer(name="z")), WRONG, "200 without the output y"),
        (frame(3, 0, 1, struct.pack(">I", 7)), 503, "the server reset the call: HTTP/2 code 7"),
        (frame(3, 0, 1, struct.pack(">I", 2)), 0, "the server reset the call: HTTP/2 code 2"),
        (frame(7, 0, 0, bytes(8)), 503, "the server is closing its connections"),
        (frame(1, 5, 1, HEAD), WRONG, WITHOUT),
        *((whole(answer(), code), WRONG, WITHOUT) for code in ("²".encode(), b"9" * 5000)),
        (frame(1, 5, 1, STATUS + b"\x010"), WRONG, "OK without one message that is not compressed"),
    ],
)
def test_answers_that_fail_say_why(data: bytes, status: int, error: str) -> None:
    wire = called()
    assert (wire.feed(data), wire.error) == (status, error)
    assert wire.unread is ("the server" in error and status == 503)  # another one may have it


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad\r\n\r\n",
        frame(1, 5, 1, b"\xff\xff\xff"),
        frame(8, 0, 0, b"1"),
        frame(9, 0, 1, bytes(16_000)) * 20,
    ],
    ids=["HTTP/1.1", "headers", "window", "endless headers"],
)
def test_what_is_no_http2_is_refused(data: bytes) -> None:
    with pytest.raises(NotHttpError):
        called().feed(data)


@pytest.mark.parametrize("most", [0, 1, (1 << 32) - 1])
def test_frames_are_no_smaller_and_no_larger_than_http2_has_them(most: int) -> None:
    wire = Grpc([call_of(bytes(17 << 20))], AnswerCheck(["y"]), b"")
    window = struct.pack(">HIHI", 5, most, 4, 1 << 30)
    wire.feed(frame(4, 0, 0, window) + frame(8, 0, 0, struct.pack(">I", 1 << 30)))
    assert len(wire.request(0)) > 17 << 20


def test_a_call_waits_for_the_server_s_windows() -> None:
    wire = Grpc([call_of(bytes(100_000))], AnswerCheck(["y"]), b"")
    sent = wire.request(0)
    assert 65_535 < len(sent) < 65_535 + 200
    assert wire.feed(frame(8, 0, 0, struct.pack(">I", 100_000))) is None
    assert wire.control == b""  # the window of the call itself is still closed
    wire.feed(frame(8, 0, 1, struct.pack(">I", 100_000)))
    assert len(sent + wire.control) > 100_000
    assert wire.control[4] & 1 or b"\x00\x01" in wire.control  # the last frame ends the call
