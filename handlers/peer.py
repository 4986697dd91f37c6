"""Notices a client that has left although bytes of it are still unread. Event loop only.

Tornado looks at a connection only while it holds nothing from it: one byte behind a request, such
as a line feed or the next request, hides the close. Hence the system is asked, as often as the
replaced server asks it.
"""

from __future__ import annotations

import asyncio
import select

from tornado.iostream import IOStream

_EVERY = 0.2  # seconds
# Linux alone tells of a closed sending half with data before it.
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class PeerWatch:
    """Closes `stream` once its client has closed the connection or its sending half."""

    def __init__(self, stream: IOStream) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_EVERY, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._stream.closed():
            return
        poll = select.poll()
        poll.register(self._stream.fileno(), _GONE)
        if poll.poll(0):
            self._stream.close()
        else:
            self._timer = self._loop.call_later(_EVERY, self._look)
