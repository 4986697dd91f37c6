"""The body of /v2/models/{m}/infer: token ids in a tensor. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindstream.handlers.field_table import shown
from mindstream.plugin.errors import InvalidRequest

MAX_NAME_CHARS = 256
MAX_TOKENS = 2**20
_UINT32_MAX = 2**32 - 1


def read_token_input(body: Mapping[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The token ids, and the parameters: the documented ones of the body under those of the input,
    where the real server reads them. Raises InvalidRequest."""
    tensor = _only_input(body.get("inputs"))
    name = tensor.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(
            f"inputs[0].name must be string type of 1 to {MAX_NAME_CHARS} characters, got "
            f"{shown(name)}."
        )
    if tensor.get("datatype") != "UINT32":
        raise InvalidRequest(
            f"inputs[0].datatype must be UINT32, got {shown(tensor.get('datatype'))}."
        )
    token_ids = _token_ids(tensor.get("data"))
    if not _is_shape(tensor.get("shape"), len(token_ids)):
        raise InvalidRequest(
            f"inputs[0].shape must be [{len(token_ids)}] or [1,{len(token_ids)}] for that many "
            f"values in data, got {shown(tensor.get('shape'))}."
        )
    outputs = body.get("outputs")
    if not isinstance(outputs, list) or not outputs:
        raise InvalidRequest(f"outputs must be array type and not empty, got {shown(outputs)}.")
    return token_ids, {**_parameters(body), **_parameters(tensor)}


def _is_shape(shape: Any, count: int) -> bool:
    # To Python true and 1.0 equal 1; in JSON they are no integers.
    return shape in ([count], [1, count]) and all(type(size) is int for size in shape)


def _only_input(inputs: Any) -> Mapping[str, Any]:
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise InvalidRequest(f"inputs must be an array of exactly one object, got {shown(inputs)}.")
    return inputs[0]


def _token_ids(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or not 0 < len(data) <= MAX_TOKENS:
        given = len(data) if isinstance(data, list) else shown(data)
        raise InvalidRequest(f"inputs[0].data must hold 1 to {MAX_TOKENS} token ids, got {given}.")
    # The set and the ends are found without running Python for each element.
    if not set(map(type, data)) <= {int}:
        wrong = next(value for value in data if type(value) is not int)
        raise InvalidRequest(f"inputs[0].data must hold UINT32 values, got {shown(wrong)}.")
    for value in (min(data), max(data)):
        if not 0 <= value <= _UINT32_MAX:
            raise InvalidRequest(f"inputs[0].data must hold UINT32 values, got {shown(value)}.")
    return tuple(data)


def _parameters(place: Mapping[str, Any]) -> dict[str, Any]:
    value = place.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("parameters must be object type.")
    return {key: given for key, given in value.items() if given is not None}
