"""The reply table of the Triton dialect, for docs/protocol.md; golden files hold it true."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplyField:
    """One key of a reply or of a list item. Where it is under `details` the name says so."""

    name: str
    kind: str
    ours: str
    documented: str
    real_server: str


REPLY_FIELDS = (
    ReplyField(
        "id", "string", "The request's, else `endpoint_common_N`.", "the request's id", "same"
    ),
    ReplyField("model_name", "string", "The served name.", "the model's name", "same"),
    ReplyField("model_version", "null", "Always null.", "string; null in samples", "null"),
    ReplyField(
        "text_output",
        "string",
        "The text this event adds, never broken inside a character; what was held back comes with "
        "the last event, a character that was never completed as U+FFFD. With "
        "`serving.full_text_enabled` all the text so far. The prompt is not part of it.",
        "the text",
        "same; a cut character is lost at the end; with full text any event may end in U+FFFD",
    ),
    ReplyField(
        "details",
        "object",
        "Only with `parameters.details: true`.",
        "details of the result",
        "same",
    ),
    ReplyField(
        "details.finish_reason",
        "string",
        "Only in the last event: `eos_token`, `stop_sequence` (a stop call), `length`, "
        "`invalid flag`.",
        "the same words, only in the last event",
        "`invalid finishReason` instead of `invalid flag`",
    ),
    ReplyField(
        "details.generated_tokens",
        "integer",
        "Cumulative, the end token and those of an earlier attempt included.",
        "number of tokens, over both nodes with PD",
        "same",
    ),
    ReplyField(
        "details.first_token_cost",
        "null or array",
        "null. With `serving.measured_costs`: `[ms of the first token]`.",
        "List[token], not measured: null",
        "null",
    ),
    ReplyField(
        "details.decode_cost",
        "null or integer",
        "null. With `serving.measured_costs`: ms of all tokens behind the first.",
        "int, not measured: null",
        "null",
    ),
    ReplyField(
        "details.batch_size",
        "integer",
        "Sequences in this event's step; an array with one entry a step in /generate.",
        "batch size of the stream",
        "same",
    ),
    ReplyField(
        "details.queue_wait_time",
        "integer",
        "Microseconds until this event's step began; an array in /generate.",
        "microseconds",
        "same",
    ),
    ReplyField(
        "prefill_time",
        "float or null",
        "Milliseconds to the first token; null in all others. Only in a stream with details.",
        "float, ms",
        "integer, ms",
    ),
    ReplyField(
        "decode_time",
        "float or null",
        "Milliseconds since the previous token; null in the first event. Only in a stream with "
        "details.",
        "float, ms",
        "integer, ms",
    ),
)
