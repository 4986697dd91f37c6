"""Token ids to text, one id at a time, on the event loop. O(1) amortised a token.

A piece never ends inside a UTF-8 character: an incomplete tail is held back until it completes or
`flush()` ends the text. The pieces joined are the text, whatever way they were cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one answer."""

    def push(self, token_id: int) -> str:
        """The text that this id completes; often empty."""

    def flush(self) -> str:
        """What was held back, its broken bytes as U+FFFD. Nothing may be pushed after it."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes: exact, also for bytes that never become text."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any other vocabulary: the difference between two decodings of the last few ids.

    A SentencePiece decoder drops the space before the first token of what it decodes; decoding both
    windows from the same id lets that cancel out.
    """

    # Four byte tokens make the longest character; a longer run of U+FFFD is broken for good.
    _MAX_HELD = 8

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0  # ids of the window whose text is out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        old = self._decode(self._window[: self._given])
        text = self._decode(self._window)
        held = len(self._window) - self._given
        if text.endswith(REPLACEMENT) and held <= self._MAX_HELD:
            return ""
        # No text yet (a special token, say): the window may grow a little.
        if len(text) <= len(old) and held <= self._MAX_HELD:
            return ""
        del self._window[: self._given]
        self._given = len(self._window)
        return text[len(old) :]

    def flush(self) -> str:
        old = self._decode(self._window[: self._given])
        text = self._decode(self._window)
        self._given = len(self._window)
        return text[len(old) :]
