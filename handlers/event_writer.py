"""A stream's events onto its connection, at the price of one system call each. Event loop.

Tornado's own way makes two futures and two callbacks of each write, which is a quarter of what
an event costs the server. Its buffer and its futures still serve whenever the socket is full.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future

from tornado.iostream import IOStream, StreamClosedError
from tornado.web import RequestHandler

from mindstream.handlers.sse import CONTENT_TYPE

# Seconds a client may leave a full socket unread; the real server's write timeout.
WRITE_TIMEOUT = 600.0

log = logging.getLogger(__name__)


class EventWriter:
    """One reply of `handler` over its connection; `request_id` is for the log.

    The headers go out with the first event, by way of Tornado.
    """

    def __init__(self, handler: RequestHandler, stream: IOStream, request_id: str) -> None:
        self._handler = handler
        self._stream = stream
        self._request_id = request_id
        self._straight = False
        self.chunked = False  # as Tornado decides with the headers

    async def send(self, event: bytes) -> None:
        """Waits while the client does not read. Raises StreamClosedError once it is gone."""
        if self._straight:
            written = write_chunk(self._stream, event, chunked=self.chunked)
            if written is not None:
                await self._drain(written)
            return
        handler = self._handler
        if not handler._headers_written:
            self._set_headers()
        handler.write(event)
        flushed = handler.flush()
        self.chunked = "Transfer-Encoding" in handler._headers
        self._straight = not handler._transforms  # an application around ours may compress
        await self._drain(flushed)

    def _set_headers(self) -> None:
        handler = self._handler
        handler.set_header("Content-Type", CONTENT_TYPE)
        handler.set_header("Cache-Control", "no-cache")
        handler.set_header("X-Accel-Buffering", "no")
        # Else the second token waits for the client's delayed acknowledgement, 40 ms. Tornado
        # switches it off again behind every request of a connection.
        self._stream.set_nodelay(True)
        if handler.request.version != "HTTP/1.1":
            # Else Tornado promises a keep-alive that was asked for.
            handler.request.headers["Connection"] = "close"

    async def _drain(self, written: Future[None]) -> None:
        """Back-pressure: the engine's chunks wait."""
        # Not wait_for, which would cancel it: Tornado cannot bear that.
        done, _ = await asyncio.wait({written}, timeout=WRITE_TIMEOUT)
        if not done:
            log.warning("%s: the client read nothing for %.0f s", self._request_id, WRITE_TIMEOUT)
            self._stream.close()
            raise StreamClosedError
        written.result()


def write_chunk(stream: IOStream, event: bytes, *, chunked: bool) -> Future[None] | None:
    """Behind the headers. None if all of it went out at once, else what is done with the rest.

    `chunked`: in the framing of RFC 9112, 7.1. Raises StreamClosedError.
    """
    data = b"%x\r\n%b\r\n" % (len(event), event) if chunked else event
    if stream.closed() or stream.writing():
        return stream.write(data)
    try:
        sent = stream.write_to_fd(memoryview(data))
    except OSError:  # full, or broken: Tornado's write meets it again, and waits or closes
        sent = 0
    return None if sent == len(data) else stream.write(data[sent:])
