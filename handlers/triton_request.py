"""A Triton request, read: from a JSON body to the values of the table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindstream.handlers import triton_fields as table
from mindstream.handlers.field_table import Mode, read_fields
from mindstream.plugin.errors import InvalidRequest
from mindstream.plugin.media.items import Item, parse_items
from mindstream.plugin.serving_config import ServingConfig
from mindstream.plugin.validation import Draft


@dataclass(frozen=True, slots=True)
class Recompute:
    """`text_input` of a request that goes on behind an earlier attempt (PD recompute)."""

    token_ids: tuple[int, ...]  # prompt and what was generated
    generated_before: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """`parameters`, checked; `values` holds those that were given."""

    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """The value given, else the table's default, else None."""
        return self.values.get(name, table.DEFAULTS.get(name))

    @property
    def details(self) -> bool:
        return bool(self.get("details"))

    @property
    def timeout(self) -> float:
        """Seconds."""
        return float(self.get("timeout"))

    @property
    def first_token_ms(self) -> int | None:
        return self.values.get("firstTokenCost")

    @property
    def decode_ms(self) -> int:
        return sum(self.values.get("decodeTime", ()))


def read_id(body: Mapping[str, Any], mode: Mode) -> str | None:
    """The client's own id, or None."""
    return read_fields((table.ID,), body, mode).get("id")


def read_text_input(
    body: Mapping[str, Any], request_id: str, serving: ServingConfig
) -> str | Sequence[Item]:
    """The prompt, or the parsed items of a list; the length is checked where there is one."""
    value = body.get("text_input")
    if value is None:
        raise InvalidRequest("The text_input not found")
    if isinstance(value, list):
        return parse_items(value)
    if not isinstance(value, str):
        raise InvalidRequest(f"The type of text_input is abnormal. The requestId is {request_id}")
    check_text_length(value, serving)
    return value


def check_text_length(text: str, serving: ServingConfig) -> None:
    """Raises InvalidRequest for an empty or too long text."""
    bounds = table.TEXT_INPUT.range(serving.validation)
    if bounds is not None and not bounds.holds(len(text)):
        # The lenient bound is the deployment's own; a client wants it as a number.
        limit = bounds.text.replace("maxRequestLength", str(serving.max_request_length * 2**20))
        raise InvalidRequest(table.TEXT_INPUT.message.format(range=limit, value=len(text)))


def check_token_count(count: int) -> None:
    """Raises InvalidRequest for a text that is no token or more than any server takes."""
    if not 0 < count <= table.MAX_TEXT_TOKENS:
        raise InvalidRequest(f"text_input token length must be in (0, 1048576], but got {count}")


def read_recompute(text: str) -> Recompute:
    """`promptLength,id,id,...`: so many ids are the prompt, the others were generated."""
    parts = text.split(",")
    # isdigit alone takes other scripts' digits; a longer number is no token id and no length.
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
        raise InvalidRequest(
            "text_input must be `promptLength,id,id,...` in decimal digits with is-recompute."
        )
    length, *ids = map(int, parts)
    check_token_count(len(ids))
    if not 0 < length <= len(ids):
        raise InvalidRequest(
            f"text_input says {length} prompt tokens, which must be in [1,{len(ids)}], the number "
            "of token ids that follow."
        )
    return Recompute(tuple(ids), len(ids) - length)


def read_parameters(value: Any, mode: Mode) -> Parameters:
    """`parameters` of a body, or nothing for an absent one."""
    if value is None:
        return Parameters({})
    return Parameters(
        read_fields(table.PARAMETERS, table.PARAMETERS_FIELD.check(value, mode), mode)
    )


def check_recompute_times(parameters: Parameters, generated_before: int) -> None:
    """Raises InvalidRequest unless every token generated before has its time."""
    if not generated_before:
        return
    if parameters.first_token_ms is None:
        raise InvalidRequest("Parameter firstTokenCost is required with is-recompute.")
    if len(parameters.values.get("decodeTime", ())) != generated_before - 1:
        raise InvalidRequest("Parameter decodeTime length is invalid.")


def to_draft(
    request_id: str, prompt_ids: tuple[int, ...], parameters: Parameters, generated_before: int = 0
) -> Draft:
    """The wire-neutral request."""
    return Draft(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_new_tokens=parameters.get("max_new_tokens"),
        do_sample=parameters.get("do_sample"),
        temperature=parameters.get("temperature"),
        top_k=parameters.get("top_k"),
        top_p=parameters.get("top_p"),
        typical_p=parameters.get("typical_p"),
        repetition_penalty=parameters.get("repetition_penalty"),
        watermark=parameters.get("watermark"),
        seed=parameters.get("seed"),
        priority=parameters.get("priority"),
        generated_before=generated_before,
    )
