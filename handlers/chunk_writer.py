"""One event onto a connection whose headers are out, at the price of one system call. Event loop.

Tornado's own way makes two futures and two callbacks of each write, which is a third of what an
event costs the server. Its buffer and its futures still serve whenever the socket is full.
"""

from __future__ import annotations

from asyncio import Future

from tornado.iostream import IOStream


def write_chunk(stream: IOStream, event: bytes, *, chunked: bool) -> Future[None] | None:
    """None if all of it went out at once, else what is done when the rest has gone.

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
