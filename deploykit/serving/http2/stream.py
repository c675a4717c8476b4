"""One HTTP/2 stream: its windows and its output. A subclass interprets what it receives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Protocol

from deploykit.core.tensors import Bytes
from deploykit.serving.http2.frames import DATA, FRAME, NO_ERROR, RST_STREAM, STREAM_WINDOW, frame


class Link(Protocol):
    """The part of a connection that a stream uses."""

    frame_bytes: int
    first_window: int

    def sendable(self, stream: Stream) -> int: ...
    def count_sent(self, stream: Stream, size: int) -> None: ...
    def write(self, data: bytes) -> None: ...
    def drop(self, stream: Stream) -> None: ...


class Stream:
    """From its headers to its trailers."""

    __slots__ = (
        "ended",
        "gone",
        "granted_bytes",
        "id",
        "link",
        "receive_window",
        "requested_bytes",
        "send_window",
        "trailers",
        "unsent",
    )

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.id = number
        self.send_window = link.first_window  # bytes of DATA that the client accepts
        self.receive_window = STREAM_WINDOW  # bytes of DATA that the client may still send
        self.granted_bytes = 0  # added to it for a large message
        self.requested_bytes = 0  # to be added once the connection's limit allows
        self.unsent: list[memoryview] = []  # DATA blocked by the windows; few, so no deque
        self.trailers: bytes | None = None  # the frame that follows `unsent`
        self.ended = False  # the client sends no more
        self.gone = False  # it has ended: nothing can be sent

    # -- for subclasses --------------------------------------------------------------------------

    @property
    @abstractmethod
    def unanswered(self) -> int:
        """Requests whose replies have not been written."""

    @abstractmethod
    def begin(self, ended: bool) -> None:
        """The headers have been read; `ended`: nothing follows."""

    @abstractmethod
    def receive(self, piece: bytes, ended: bool) -> None:
        """The content of a DATA frame; `ended`: it is the last."""

    @abstractmethod
    def resume(self) -> None:
        """All output was sent; there may be more."""

    @abstractmethod
    def check(self, now_s: float) -> None:
        """Fail the stream if it is past a limit; called periodically."""

    # -- output ----------------------------------------------------------------------------------

    def send(self, parts: Iterable[Bytes]) -> None:
        self.unsent.extend(map(memoryview, parts))
        self.push()

    def end(self, trailers: bytes) -> None:
        """Send the last frame once the DATA before it is sent."""
        self.trailers = trailers
        self.push()

    def push(self) -> None:
        """Send what the windows allow."""
        link, unsent = self.link, self.unsent
        while unsent:
            take = min(link.sendable(self), link.frame_bytes)
            if take <= 0:
                return
            pieces = []
            size = 0
            while unsent and size < take:
                piece = unsent.pop(0)
                if size + len(piece) > take:
                    unsent.insert(0, piece[take - size :])
                    piece = piece[: take - size]
                pieces.append(piece)
                size += len(piece)
            link.count_sent(self, size)
            head = FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, self.id)
            link.write(b"".join((head, *pieces)))
        if self.trailers is None:
            self.resume()
        else:
            link.write(self.trailers)
            if not self.ended:  # the client need not send more
                link.write(frame(RST_STREAM, 0, self.id, NO_ERROR.to_bytes(4, "big")))
            self.finish()

    def reset(self, code: int) -> None:
        """End the stream with an error code of HTTP/2 instead of an answer."""
        self.link.write(frame(RST_STREAM, 0, self.id, code.to_bytes(4, "big")))
        self.finish()

    def finish(self) -> None:
        """End the stream; unsent output is dropped."""
        self.gone = True
        self.trailers = None
        self.unsent.clear()
        self.link.drop(self)
