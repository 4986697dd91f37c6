"""Framing of server-sent events, and what a stream needs from a dialect. Pure.

The Triton dialect writes `data:` without a space, the others with one; a parser that follows the
standard takes both.
"""

from __future__ import annotations

from typing import Protocol

from mindstream.plugin.service import TextChunk

CONTENT_TYPE = "text/event-stream"


class StreamCodec(Protocol):
    """One stream's bytes. Each result is one write: an event is never cut in two."""

    def event(self, chunk: TextChunk) -> bytes:
        """The event of one chunk."""

    def error(self, error: BaseException) -> bytes:
        """The last event of a stream that failed after it had opened."""

    def end(self) -> bytes:
        """What follows the last event, or b""."""


def frame(payload: bytes, *, space: bool) -> bytes:
    """One event that holds `payload`, JSON on a single line."""
    return b"data: %b\n\n" % payload if space else b"data:%b\n\n" % payload
