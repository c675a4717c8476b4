"""One HTTP/2 stream: its windows and what it sends. A subclass gives what it receives a meaning."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from deploykit.serving.http2.frames import DATA, FRAME, NO_ERROR, RST_STREAM, STREAM_WINDOW, frame


class Link(Protocol):
    """What a stream needs of its connection."""

    frame_bytes: int
    first_window: int

    def sendable(self, stream: Stream) -> int: ...
    def sent(self, stream: Stream, size: int) -> None: ...
    def write(self, data: bytes) -> None: ...
    def drop(self, stream: Stream) -> None: ...


class Stream:
    """From its headers to its trailers."""

    __slots__ = (
        "asked_bytes",
        "ended",
        "finished",
        "granted_bytes",
        "id",
        "link",
        "out",
        "receive_window",
        "send_window",
        "trailers",
    )

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.id = number
        self.send_window = link.first_window  # bytes of DATA that the client accepts
        self.receive_window = STREAM_WINDOW  # bytes of DATA that the client may still send
        self.granted_bytes = 0  # what was added to it for a large message
        self.asked_bytes = 0  # what is to be added once the connection can hold it
        self.out: deque[memoryview] = deque()  # DATA that the windows hold up
        self.trailers: bytes | None = None  # the frame that follows `out`
        self.ended = False  # the client has sent its last
        self.finished = False

    # -- what a subclass provides ----------------------------------------------------------------

    @property
    @abstractmethod
    def unanswered(self) -> int:
        """Requests whose replies have not been written."""

    @abstractmethod
    def begin(self, *, ended: bool) -> None:
        """The headers have been read; `ended`: nothing follows them."""

    @abstractmethod
    def received(self, piece: bytes, ended: bool) -> None:
        """The content of a DATA frame; `ended`: the last of the stream."""

    @abstractmethod
    def resume(self) -> None:
        """All that was to be sent has been; more may be."""

    @abstractmethod
    def check(self, now_s: float) -> None:
        """Fail the stream if it is past a limit; called every so often."""

    @abstractmethod
    def cancelled(self) -> None:
        """The client gave up, or its connection has ended."""

    # -- output ----------------------------------------------------------------------------------

    def send(self, parts: Iterable[bytes]) -> None:
        self.out.extend(map(memoryview, parts))
        self.push()

    def end(self, trailers: bytes) -> None:
        """Send the last frame once the DATA before it is sent."""
        self.trailers = trailers
        self.push()

    def push(self) -> None:
        """Send what the windows allow."""
        link, out = self.link, self.out
        while out:
            take = min(link.sendable(self), link.frame_bytes)
            if take <= 0:
                return
            pieces = []
            size = 0
            while out and size < take:
                piece = out.popleft()
                if size + len(piece) > take:
                    out.appendleft(piece[take - size :])
                    piece = piece[: take - size]
                pieces.append(piece)
                size += len(piece)
            link.sent(self, size)
            head = FRAME.pack(size >> 16, size & 0xFFFF, DATA, 0, self.id)
            link.write(b"".join((head, *pieces)))
        if self.trailers is None:
            self.resume()
        else:
            link.write(self.trailers)
            if not self.ended:  # the client need not send the rest
                link.write(frame(RST_STREAM, 0, self.id, NO_ERROR.to_bytes(4, "big")))
            self.finish()

    def finish(self) -> None:
        """The stream is over, whatever was to be sent."""
        self.finished = True
        self.trailers = None
        self.out.clear()
        self.link.drop(self)
