"""`text_input` as a list: parsed and checked without looking at any file or host. Pure.

The checks of the replaced server come first, in its order and with its texts; what it leaves to a
later failure is refused behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindstream.plugin.errors import InvalidRequest
from mindstream.plugin.media.formats import Kind, MediaError
from mindstream.plugin.media.sources import Source, parse_source

MAX_MEDIA_ITEMS = 20

_TEXT = "text"
_KEYS = (_TEXT, *(kind.value for kind in Kind))
# The order in which the replaced server looks for nulls.
_NULL_ORDER = ("image_url", "audio_url", "video_url")


@dataclass(frozen=True, slots=True)
class TextItem:
    """One stretch of the prompt."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One picture, film or sound; `index` is its place in the list."""

    kind: Kind
    source: Source
    index: int


Item = TextItem | MediaItem


def parse_items(items: Sequence[object]) -> tuple[Item, ...]:
    """Takes the decoded JSON list; raises InvalidRequest."""
    if not items:
        raise InvalidRequest("Parameter text_input arr is empty")
    _check_as_replaced_server(items)
    return tuple(_item(index, item) for index, item in enumerate(items))


def text_only(items: Sequence[Item], model: str) -> str:
    """The texts behind each other; raises InvalidRequest if there is anything else."""
    for item in items:
        if isinstance(item, MediaItem):
            raise InvalidRequest(
                f"The model {model} takes text only, but text_input[{item.index}] is of type "
                f"{item.kind.value}."
            )
    return "".join(item.text for item in items if isinstance(item, TextItem))


def _check_as_replaced_server(items: Sequence[object]) -> None:
    media = 0
    for item in items:
        if not isinstance(item, dict):
            continue
        if _TEXT in item and not isinstance(item[_TEXT], str):
            raise InvalidRequest("Request param text must be string")
        for key in _NULL_ORDER:
            if key in item and item[key] is None:
                raise InvalidRequest(f"Request param {key} null")
        media += any(key in item for key in _NULL_ORDER)
        if media > MAX_MEDIA_ITEMS:
            raise InvalidRequest(
                f"The number of multimodal url should be no more than {MAX_MEDIA_ITEMS}"
            )


def _item(index: int, item: object) -> Item:
    where = f"text_input[{index}]"
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be object type.")
    key = _key(where, item)
    if key == _TEXT:
        if not item[_TEXT]:
            raise InvalidRequest(f"{where}.text must not be empty.")
        return TextItem(item[_TEXT])
    value = item[key]
    if isinstance(value, dict):
        where, value = f"{where}.{key}", value.get("url")
        key_name = "url"
    else:
        key_name = key
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{key_name} must be string type.")
    try:
        return MediaItem(Kind(key), parse_source(Kind(key), value), index)
    except MediaError as error:
        raise InvalidRequest(f"{where}.{key_name} {error}.") from None


def _key(where: str, item: dict[str, object]) -> str:
    """Which of the four keys holds the item's content. Without `type` exactly one must be there."""
    kind = item.get("type")
    if kind is None:
        present = [key for key in _KEYS if key in item]
        if len(present) != 1:
            raise InvalidRequest(
                f"{where} needs `type` or exactly one of {', '.join(_KEYS)}, "
                f"got {', '.join(present) or 'none of them'}."
            )
        return present[0]
    if kind not in _KEYS:
        given = repr(kind)[:40]
        raise InvalidRequest(f"{where}.type must be one of {', '.join(_KEYS)}, got {given}.")
    key = str(kind)
    if key not in item:
        raise InvalidRequest(f"{where} is of type {key} but has no {key}.")
    return key
