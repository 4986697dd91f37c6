"""A yaml mapping becomes a frozen dataclass; every refusal names field, bound and value given."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from mindstream.plugin.errors import ConfigError
from mindstream.plugin.strict_yaml import describe

T = TypeVar("T")

# MindIE's words that differ from ours by more than camelCase.
_MINDIE_NAMES = {
    "modelname": "name",
    "backendtype": "backend",
    "npumemsize": "kv_cache_gib",
    "maxprefilltokens": "max_batched_tokens",
    "enableprefixcache": "prefix_cache",
}


def check_block(kind: type[T], data: object, file: str, path: str) -> T:
    """`data` (a mapping, or None for all defaults) as `kind`. An empty value means its default."""
    values = _without_empty(_known(kind, data, file, path))
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(str(error), values, kind, file, path)) from None


def _known(kind: type, data: object, file: str, path: str) -> dict[str, Any]:
    """`data` after every key, at any depth, proved to be a field."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file}: {path} must be a mapping, but is {describe(data)}.")
    hints = get_type_hints(kind)
    known = {}
    for key, value in data.items():
        if key not in hints:
            raise ConfigError(_unknown(kind, key, file, path))
        where = f"{path}.{key}"
        if is_dataclass(hints[key]):
            known[key] = _known(hints[key], value, file, where)
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{file}: {where} must be a finite number, but is {value}.")
        known[key] = value
    return known


def _without_empty(data: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_empty(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if value is not None
    }


def _unknown(kind: type, key: object, file: str, path: str) -> str:
    everywhere = dict(field_paths(kind))
    plain = _plain(str(key))
    near = same_word(str(key), everywhere)
    if near is None:
        spelt = {_plain(name): name for name in everywhere if "." not in name}
        close = difflib.get_close_matches(plain, spelt, 1, cutoff=0.0)
        near = spelt[close[0]]
    return f"{file}: unknown key {path}.{key}; the nearest valid key is {path}.{near}."


def same_word(word: str, names: Iterable[str]) -> str | None:
    """The one of dotted `names` that is `word` or MindIE's name of it, however it is written."""
    plain, known = _plain(word), list(names)
    theirs = _MINDIE_NAMES.get(plain)
    by_plain = {_plain(name.rpartition(".")[2]): name for name in reversed(known)}
    return theirs if theirs in known else by_plain.get(plain)


def field_paths(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, annotated type) of every field, blocks before their fields."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield prefix + name, hint
        inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if is_dataclass(inner) and isinstance(inner, type):
            yield from field_paths(inner, f"{prefix}{name}.")


def _plain(name: str) -> str:
    """`maxSeqLen`, `max-seq-len` and `max_seq_len` are the same word."""
    return re.sub(r"[\W_]", "", name).lower()


def _sentence(message: str, values: Mapping[str, Any], kind: type, file: str, path: str) -> str:
    """msgspec names the place, as in ``... - at `$.cpu.threads` ``; the annotation the rest."""
    place = message.rpartition(" - at `$.")[2].rstrip("`")
    value: Any = values
    for word in place.split("."):
        value = value[word]
    wanted = allowed(dict(field_paths(kind))[place])
    return f"{file}: {path}.{place} must be {wanted}, but is {describe(value)}."


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def allowed(hint: Any) -> str:
    """What a field may hold, in words: `a whole number in [1, 4096]`."""
    kind, meta = get_args(hint)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(kind))
    if kind not in _WORDS:
        return "a mapping"
    if meta.pattern is not None:
        return f"text matching `{meta.pattern}`"
    if meta.ge is None and meta.gt is None:
        return _WORDS[kind]
    if meta.le is None and meta.lt is None:
        return _WORDS[kind] + (f" > {meta.gt}" if meta.ge is None else f" >= {meta.ge}")
    low = f"({meta.gt}" if meta.ge is None else f"[{meta.ge}"
    high = f"{meta.lt})" if meta.le is None else f"{meta.le}]"
    return f"{_WORDS[kind]} in {low}, {high}"
