"""From what a dialect read to a GenerationRequest a backend can trust. Pure, free of HTTP."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from mindstream.plugin.defaults import Defaults
from mindstream.plugin.errors import InvalidRequest, RequestRefused
from mindstream.plugin.request import GenerationRequest
from mindstream.plugin.service import ServiceLimits


@dataclass(frozen=True, slots=True)
class Draft:
    """One request before the deployment has its say; None means that the client did not say.

    Values are of the right type and in the dialect's range. `prompt_ids` ends with the
    `generated_before` ids of an earlier attempt, which `max_new_tokens` counts too.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int | None = None  # None: as many as the limits allow
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    watermark: bool = False
    seed: int | None = None
    priority: int = 5
    ignore_eos: bool = False
    generated_before: int = 0
    cache_salt: str = ""


def to_generation_request(
    draft: Draft, defaults: Defaults, limits: ServiceLimits
) -> GenerationRequest:
    """Raises RequestRefused for a prompt the model cannot take, InvalidRequest if nothing is left
    to generate. The output length is cut to every limit and is never an error."""
    _check_prompt(draft, limits)
    return GenerationRequest(
        request_id=draft.request_id,
        prompt_ids=draft.prompt_ids,
        max_new_tokens=_output_limit(draft, limits),
        sampling=defaults.sampling(
            seed=draw_seed() if draft.seed is None else draft.seed,
            do_sample=draft.do_sample,
            temperature=draft.temperature,
            top_k=draft.top_k,
            top_p=draft.top_p,
            typical_p=draft.typical_p,
            repetition_penalty=draft.repetition_penalty,
            watermark=draft.watermark,
        ),
        eos_token_ids=() if draft.ignore_eos else defaults.eos_token_ids.value,
        priority=draft.priority,
        generated_before=draft.generated_before,
        cache_salt=draft.cache_salt,
    )


def draw_seed() -> int:
    """A seed of all 64 bits but 0, which the protocol does not allow."""
    return secrets.randbelow(2**64 - 1) + 1


def _check_prompt(draft: Draft, limits: ServiceLimits) -> None:
    count = len(draft.prompt_ids)
    # What was generated before is output: only the sequence length bounds it.
    prompt, longest = count - draft.generated_before, limits.max_input_tokens
    if prompt > longest or count >= limits.max_seq_len:
        longest, count = (longest, prompt) if prompt > longest else (limits.max_seq_len - 1, count)
        raise RequestRefused(
            f"This model's maximum input ids length cannot be greater than {longest},the input "
            f"ids length is {count}"
        )
    if max(draft.prompt_ids) >= limits.vocab_size or min(draft.prompt_ids) < 0:
        raise RequestRefused("Invalid Input Ids")


def _output_limit(draft: Draft, limits: ServiceLimits) -> int:
    """Tokens in all, those generated before included, as `GenerationRequest` counts them."""
    before = draft.generated_before
    room = limits.max_seq_len - (len(draft.prompt_ids) - before)
    most = min(limits.max_iter_times, room)
    if draft.max_new_tokens is not None:
        most = min(most, draft.max_new_tokens)
    if most <= before:
        raise InvalidRequest(
            f"Parameter max_new_tokens leaves nothing to generate: {before} tokens were generated "
            f"before, and at most {most} are allowed."
        )
    return most
