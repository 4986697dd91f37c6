"""What a row of a request table is, and how a value is held against it. Pure.

Type rules are the real server's: a float is any JSON number, an integer is a JSON integer (5.0 is
none), an unsigned is an integer that is not negative, and a boolean is never a number. `null` is
the same as absent; the caller looks a field up and asks only about values that are there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mindstream.plugin.errors import InvalidRequest

Mode = Literal["strict", "lenient"]
Kind = Literal["float", "integer", "unsigned", "boolean", "string", "array", "object", "text"]

_SHOWN_CHARS = 64


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# `text` is text_input: the one field with two types, checked by its own reader.
_TYPES: Mapping[Kind, Callable[[Any], bool]] = {
    "float": lambda value: isinstance(value, float) or _is_integer(value),
    "integer": _is_integer,
    "unsigned": lambda value: _is_integer(value) and value >= 0,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "text": lambda value: isinstance(value, str | list),
}


@dataclass(frozen=True, slots=True)
class Range:
    """An interval, closed above. `text` is how messages and documents write it."""

    low: float
    high: float
    text: str
    low_open: bool = True

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return above and value <= self.high


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request.

    `message` is what a value out of range gets, with `{range}` and `{value}`. `each` makes the
    range that of an array's elements. `default` is what an absent field counts as; where the model
    or the request decides that, it is None and `default_words` tell. The words at the end are for
    docs/protocol.md alone.
    """

    name: str
    kind: Kind
    strict: Range | None = None
    lenient: Range | None = None  # None: as strict
    message: str = ""
    lenient_message: str = ""  # "": as message
    pattern: re.Pattern[str] | None = None
    each: bool = False
    required: bool = False
    default: Any = None
    default_words: str = ""
    ours: str = ""
    documented: str = ""
    real_server: str = ""
    place: Literal["body", "parameters"] = field(default="parameters")

    def range(self, mode: Mode) -> Range | None:
        return self.lenient or self.strict if mode == "lenient" else self.strict

    def check(self, value: Any, mode: Mode) -> Any:
        """`value`, ready to use, or InvalidRequest with the real server's text where known."""
        if not _TYPES[self.kind](value):
            raise InvalidRequest(f"{self.name} must be {self.kind} type.")
        if self.pattern is not None and not self.pattern.fullmatch(value):
            raise InvalidRequest(self.message)
        bounds = self.range(mode)
        if self.each:
            _check_elements(self.name, value)
        # Of an array the ends tell for all, without a look at each.
        for item in ((min(value), max(value)) if value else ()) if self.each else (value,):
            if bounds is not None and not bounds.holds(item):
                raise InvalidRequest(self._out_of_range(item, bounds, mode))
        return float(value) if self.kind == "float" else value

    def _out_of_range(self, value: Any, bounds: Range, mode: Mode) -> str:
        message = self.lenient_message if mode == "lenient" else ""
        return (message or self.message).format(range=bounds.text, value=shown(value))


def _check_elements(name: str, values: list[Any]) -> None:
    # bool is a type of its own here; the set is made without running Python for each element.
    if not set(map(type, values)) <= {int} or min(values, default=0) < 0:
        raise InvalidRequest(f"{name} must be unsigned type.")


def shown(value: Any) -> str:
    """A value as a message shows it: short, whatever was sent."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def read_fields(table: tuple[Field, ...], values: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
    """The fields of `values` that are there, checked in the order of the table."""
    return {
        row.name: row.check(values[row.name], mode)
        for row in table
        if values.get(row.name) is not None
    }
