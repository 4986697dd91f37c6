"""A request body as JSON: what is accepted, in one place. Pure; safe on any thread.

Rules, the same for every dialect:
- The bytes are strict UTF-8 without a byte order mark and hold one JSON object.
- `NaN`, `Infinity`, numbers outside double precision, integers beyond 4,300 digits and lone
  surrogate escapes are not JSON: refused, wherever they stand.
- Of equal keys the last one counts, as with the real server.
- Containers nest at most `max_depth` deep; the body itself is level 1.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mindstream.plugin.errors import InvalidRequest

# The real server's text for every body it cannot read.
PARSE_ERROR = "Failed to parse request context to json"

# A JSON value costs up to twenty times its bytes in memory, so a body of many tiny values could
# take a gigabyte. The longest text allowed (4 Mi characters), were it all commas, still passes.
MAX_VALUES = 4_500_000


def parse_json_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """The object in `body`; InvalidRequest says why there is none."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        raise InvalidRequest(f"{PARSE_ERROR}: the body holds more than {MAX_VALUES} values.")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{PARSE_ERROR}: {error}.") from error
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{PARSE_ERROR}: the body must be an object.")
    if _deeper_than(value, max_depth):
        raise _too_deep(max_depth)
    return value


def _too_deep(max_depth: int) -> InvalidRequest:
    return InvalidRequest(f"{PARSE_ERROR}: it is nested deeper than {max_depth} levels.")


def _deeper_than(value: dict[str, Any], max_depth: int) -> bool:
    level: list[Any] = [value]
    for _ in range(max_depth):
        children: list[Any] = []
        for container in level:
            items = container.values() if isinstance(container, dict) else container
            children.extend(item for item in items if isinstance(item, dict | list))
        if not children:
            return False
        level = children
    return True
