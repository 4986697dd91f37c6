"""JSON as it goes out: compact, keys in the order given, non-ASCII as raw UTF-8. Pure.

U+0085, U+2028 and U+2029 are escaped, which means the same in JSON: a stream reader that uses
Python's `str.splitlines` (httpx does) would cut an event in two at the raw character.
"""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()
_LINE_BREAKS = tuple(
    (character.encode(), f"\\u{ord(character):04x}".encode())
    for character in ("\x85", "\u2028", "\u2029")
)


def encode(value: Any) -> bytes:
    """`value` as JSON bytes. A lone surrogate in it becomes U+FFFD."""
    try:
        data = _encoder.encode(value)
    except UnicodeEncodeError:
        data = _encoder.encode(_without_surrogates(value))
    if data.isascii():
        return data
    for raw, escaped in _LINE_BREAKS:
        data = data.replace(raw, escaped)
    return data


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value
