"""What every handler shares: the body, error replies, streams, vanished clients, the access log.

A handler implements `answer`. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from tornado.http1connection import HTTP1Connection
from tornado.httputil import HTTPServerRequest
from tornado.iostream import StreamClosedError
from tornado.web import Application, HTTPError, RequestHandler, stream_request_body

from mindstream.handlers.error_map import ErrorReply, reply_for, reply_for_status
from mindstream.handlers.event_writer import EventWriter
from mindstream.handlers.json_body import parse_json_object
from mindstream.handlers.measures import RequestMeasure
from mindstream.handlers.peer import PeerWatch
from mindstream.handlers.sse import StreamCodec
from mindstream.handlers.state import ServerState
from mindstream.handlers.wire_json import encode
from mindstream.plugin.errors import BackendFailed, PayloadTooLarge, RequestError
from mindstream.plugin.service import TextChunk

JSON_TYPE = "application/json"
# A body up to this much over the limit is read and dropped, so that a client that only reads after
# it has written sees the 413; beyond it the connection is closed behind the reply.
DRAIN_BYTES = 64 * 2**20
# Parsing about a millisecond of JSON; a longer body goes to a worker thread.
INLINE_BODY_BYTES = 256 * 2**10
# Not a status of HTTP: only the access log shows it.
CLIENT_GONE = 499

P = ParamSpec("P")
T = TypeVar("T")

access_log = logging.getLogger("mindstream.access")
log = logging.getLogger(__name__)


@stream_request_body
class ApiHandler(RequestHandler):
    """Base of all routes."""

    # Answers the request or raises a RequestError; gets the path's named groups as arguments.
    answer: Callable[..., Coroutine[Any, Any, None]]

    def __init__(
        self, application: Application, request: HTTPServerRequest, *, state: ServerState
    ) -> None:
        self.state = state
        self.request_id = "-"  # a dialect sets it as soon as it knows it
        self.measure: RequestMeasure | None = None  # of a request that generates
        self._uuid = uuid.uuid4().hex
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._client_gone = False
        self._stream_failed = False
        self._answer: asyncio.Future[None] | None = None
        super().__init__(application, request)

    # -- the request ------------------------------------------------------------------------

    async def json_body(self) -> dict[str, Any]:
        """The body as a JSON object; InvalidRequest if it is none."""
        body, self._body = b"".join(self._body), []
        depth = self.state.max_json_depth(self.path_kwargs.get("model"))
        return await self.off_loop(parse_json_object, body, depth)

    async def off_loop(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls what takes time in proportion to the body: in a worker thread if that is long."""
        if self._body_bytes <= INLINE_BODY_BYTES:
            return function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)

    def prepare(self) -> None:
        self.state.answers_on(self._connection().stream)
        # Tornado's own limit closes the connection without a reply; ours answers.
        self._max_body = self.state.max_body_bytes(self.path_kwargs.get("model"))
        self._connection().set_max_body_size(2**62)
        waits = self.request.headers.get("Expect", "").lower() == "100-continue"
        announced = self.request.headers.get("Content-Length", "")
        # Tornado refuses whatever is no number; a longer one is no body anybody sends.
        bytes_to_come = int(announced[:18]) if announced.isascii() and announced.isdigit() else 0
        if bytes_to_come > self._max_body + (0 if waits else DRAIN_BYTES):
            raise self._too_large()

    def data_received(self, chunk: bytes) -> None:
        self._body_bytes += len(chunk)
        if self._body_bytes <= self._max_body:
            self._body.append(chunk)
            return
        self._body.clear()
        if self._body_bytes > self._max_body + DRAIN_BYTES and not self._finished:
            self._render(reply_for(self._too_large()))

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"Request body too large. Maximum allowed size is {self._max_body // 2**20}MB."
        )

    # -- the answer -------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs `answer` for as long as the client is there."""
        if self._body_bytes > self._max_body:
            raise self._too_large()
        self._answer = asyncio.ensure_future(self.answer(**self.path_kwargs))
        # A request that stood behind another may outlive its connection in Tornado's buffer.
        self._client_gone = self._client_gone or self._connection().stream.closed()
        if self._client_gone:
            self._answer.cancel()
        watch = PeerWatch(self._connection().stream)
        try:
            # Not awaited itself: an answer cancelled by a backend must not look like our own end.
            await asyncio.wait({self._answer})
        finally:
            watch.stop()
            self._answer.cancel()
        self._conclude(self._answer)

    def _conclude(self, answer: asyncio.Future[None]) -> None:
        """Raises what the answer raised, unless nobody is there to be told."""
        error = None if answer.cancelled() else answer.exception()
        self._client_gone = self._client_gone or isinstance(error, StreamClosedError)
        if self._client_gone:
            if error is not None and not isinstance(error, StreamClosedError):
                self._log_failure(error)
            self.set_status(CLIENT_GONE, "Client Closed Request")
            if not self._finished:
                self.finish()
        elif answer.cancelled():
            raise BackendFailed("The request was cancelled inside the server.")
        elif error is not None:
            raise error

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self._client_gone = True
        if self._answer is not None:
            self._answer.cancel()

    def write_json(self, value: Any) -> None:
        """Ends the request with 200 and `value`: bytes of JSON, or what `encode` takes."""
        self.finish(value if isinstance(value, bytes) else encode(value))

    def write_empty(self) -> None:
        """Ends the request with 200 and no body."""
        self.clear_header("Content-Type")
        self.finish()

    async def stream(
        self, source: AbstractAsyncContextManager[AsyncIterator[TextChunk]], codec: StreamCodec
    ) -> None:
        """Sends every chunk as one event, one write.

        The headers go out with the first event: what fails before it keeps its status code. What
        fails after it becomes the dialect's error event, and the stream ends as it should.
        """
        writer = EventWriter(self, self._connection().stream, self.request_id)
        try:
            async with source as chunks:
                async for chunk in chunks:
                    await writer.send(codec.event(chunk))
            tail = codec.end()
        except StreamClosedError:
            raise
        except Exception as error:  # the one place where any failure becomes an event
            if not self._headers_written:
                raise
            self._log_failure(error)
            self._stream_failed = True
            tail = codec.error(error)
        if tail:
            await writer.send(tail)
        if not writer.chunked:
            # Without chunks the end of the connection alone ends the body, keep-alive or not.
            await self.finish()
            self._connection().stream.close()

    def _connection(self) -> HTTP1Connection:
        return cast(HTTP1Connection, self.request.connection)

    # -- headers, errors, log ---------------------------------------------------------------

    def set_default_headers(self) -> None:
        self.set_header("Server", "mindstream")
        self.set_header("Content-Type", JSON_TYPE)
        self.set_header("RequestUUID", self._uuid)

    def compute_etag(self) -> None:
        """None: an answer is never the same twice, and hashing it would cost."""

    def on_finish(self) -> None:
        if self.measure is not None:
            refused = self.get_status() >= 400 and not self._client_gone
            self.measure.end(failed=refused or self._stream_failed)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if error is None or isinstance(error, HTTPError):
            self._render(reply_for_status(status_code, self.request.path))
        else:
            self._render(reply_for(error))

    def _render(self, reply: ErrorReply) -> None:
        self.set_status(reply.status)
        if reply.retry_after is not None:
            self.set_header("Retry-After", str(reply.retry_after))
        self.finish(reply.body())

    def log_exception(
        self,
        typ: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if value is not None and not isinstance(value, HTTPError):
            self._log_failure(value)

    def _log_failure(self, error: BaseException) -> None:
        if isinstance(error, RequestError):
            log.debug("%s: %s", self.request_id, error)
        else:
            log.error("%s: fault of the server", self.request_id, exc_info=error)

    def _log(self) -> None:
        """One line a request, without its text. Tornado calls this at the end of each."""
        path = self.request.path
        access_log.info(
            "%s %s %s %d %.1f ms",
            self.request_id,
            self.request.method,
            path if path.isprintable() else ascii(path),
            self.get_status(),
            1000 * self.request.request_time(),
        )


class GetHandler(ApiHandler):
    """A route for GET and HEAD."""

    async def get(self, **_path: str | None) -> None:
        await self.run()

    head = get


class PostHandler(ApiHandler):
    """A route for POST."""

    async def post(self, **_path: str | None) -> None:
        await self.run()


class UnknownRoute(ApiHandler):
    """Whatever no route takes."""

    def prepare(self) -> None:
        super().prepare()
        raise HTTPError(404)
