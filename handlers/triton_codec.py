"""The Triton dialect's replies, byte for byte. Pure.

Keys stand in the real server's order. Times are milliseconds, `queue_wait_time` is microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mindstream.handlers.error_map import bare_text, reply_for
from mindstream.handlers.sse import frame
from mindstream.handlers.wire_json import encode
from mindstream.plugin.request import Chunk, FinishReason
from mindstream.plugin.service import TextChunk


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What shapes the replies to one request, beside its chunks."""

    request_id: str
    model_name: str
    details: bool = False
    full_text: bool = False  # MindIE's fullTextEnabled: each event has the whole text so far
    measured_costs: bool = False  # fill first_token_cost and decode_cost
    raw_error_text: bool = False  # an error in an open stream as MindIE's bare text
    # Milliseconds an earlier attempt took (PD recompute), for the measured costs.
    first_token_before: int | None = None
    decode_before: int = 0


class _Costs:
    """`first_token_cost` and `decode_cost`: null, or measured where a deployment wants it.

    The documented types are a list and an integer: `[ms of the first token]`, ms of all others.
    """

    def __init__(self, options: ReplyOptions) -> None:
        self._measured = options.measured_costs
        self._first: float | None = options.first_token_before
        self._decode: float = options.decode_before

    def add(self, chunk: Chunk) -> None:
        if self._measured:
            time = chunk.prefill_ms if chunk.prefill_ms is not None else chunk.decode_ms
            if self._first is None:
                self._first = time
            else:
                self._decode += time or 0.0

    def first_token(self) -> list[float] | None:
        if not self._measured or self._first is None:
            return None
        return [round(float(self._first), 3)]

    def decode(self) -> int | None:
        return round(self._decode) if self._measured else None


class TritonStreamCodec:
    """The events of one stream. An event's cost is a token's cost, so its parts are made ahead."""

    def __init__(self, options: ReplyOptions) -> None:
        self._options = options
        self._start = _start(options)
        self._costs = _Costs(options)
        self._text: list[str] | None = [] if options.full_text else None

    def event(self, piece: TextChunk) -> bytes:
        text = piece.text
        if self._text is not None:
            self._text.append(text)
            text = "".join(self._text)
            self._text[:] = [text]
        if not self._options.details:
            return b"data:%b%b}\n\n" % (self._start, encode(text))
        chunk = piece.chunk
        self._costs.add(chunk)
        return (
            b'data:%b%b,"details":{%b"generated_tokens":%d,"first_token_cost":%b,"decode_cost":%b,'
            b'"batch_size":%d,"queue_wait_time":%d},"prefill_time":%b,"decode_time":%b}\n\n'
        ) % (
            self._start,
            encode(text),
            _finish(chunk.finish_reason),
            chunk.generated_tokens,
            encode(self._costs.first_token()),
            encode(self._costs.decode()),
            chunk.batch_size,
            chunk.queue_wait_us,
            _milliseconds(chunk.prefill_ms),
            _milliseconds(chunk.decode_ms),
        )

    def error(self, error: BaseException) -> bytes:
        if self._options.raw_error_text:
            return bare_text(error).encode()
        reply = reply_for(error)
        return frame(
            encode(
                {
                    "id": self._options.request_id,
                    "error": reply.message,
                    "error_type": reply.error_type,
                }
            ),
            space=False,
        )

    def end(self) -> bytes:
        return b""


def whole_reply(options: ReplyOptions, pieces: Iterable[TextChunk]) -> bytes:
    """The reply of /generate: details has one entry a step, and no times."""
    pieces = list(pieces)
    text = encode("".join(piece.text for piece in pieces))
    if not options.details:
        return b"%b%b}" % (_start(options), text)
    costs = _Costs(options)
    for piece in pieces:
        costs.add(piece.chunk)
    # A last chunk without a token (stop call) is no step of its own.
    steps = [piece.chunk for piece in pieces if piece.chunk.token_ids]
    details = {
        "finish_reason": pieces[-1].chunk.finish_reason,
        "generated_tokens": pieces[-1].chunk.generated_tokens,
        "first_token_cost": costs.first_token(),
        "decode_cost": costs.decode(),
        "batch_size": [step.batch_size for step in steps],
        "queue_wait_time": [step.queue_wait_us for step in steps],
    }
    return b'%b%b,"details":%b}' % (_start(options), text, encode(details))


def token_reply(request_id: str, token_ids: list[int]) -> bytes:
    """The reply of /infer."""
    output = {
        "name": "output0",
        "shape": [1, len(token_ids)],
        "datatype": "UINT32",
        "data": token_ids,
    }
    return encode({"id": request_id, "outputs": [output]})


def _start(options: ReplyOptions) -> bytes:
    """Up to the value of text_output."""
    return b'{"id":%b,"model_name":%b,"model_version":null,"text_output":' % (
        encode(options.request_id),
        encode(options.model_name),
    )


def _finish(reason: FinishReason | None) -> bytes:
    return b"" if reason is None else b'"finish_reason":%b,' % encode(reason)


def _milliseconds(time: float | None) -> bytes:
    """A float even if whole; microseconds are the finest step that means anything."""
    return b"null" if time is None else repr(round(float(time), 3)).encode()
