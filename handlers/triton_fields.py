"""The request table of the Triton dialect: parsing, messages and docs/protocol.md come from it.

Rows of `PARAMETERS` stand in the order in which the real server checks them, so that of several
faults the same one is told. Strict ranges are the documented ones, lenient ones their union with
the real server's. A message is the real server's wherever our range is its range.
"""

from __future__ import annotations

import re

from mindstream.handlers.field_table import Field, Range

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
FLOAT_MAX = 3.4028234663852886e38
MAX_TEXT_CHARS = 4 * 2**20
MAX_TEXT_TOKENS = 2**20
MAX_MEDIA_ITEMS = 20

_POSITIVE_INT = Range(0, INT32_MAX, "(0,2147483647]")
_SIZE_T = Range(0, UINT64_MAX, "[0, 18446744073709551615]", low_open=False)
_GOT = "Parameter {} must be in {{range}}, got {{value}}."

ID = Field(
    name="id",
    kind="string",
    pattern=re.compile(r"[A-Za-z0-9_-]{1,256}"),
    message=(
        "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 "
        "words in length."
    ),
    default_words="`endpoint_common_N`, N counts from 0",
    ours="An id that is running is refused with 424.",
    documented="1 to 256 of letters, digits, `_`, `-`",
    real_server="same",
    place="body",
)
TEXT_INPUT = Field(
    name="text_input",
    kind="text",
    strict=Range(0, MAX_TEXT_CHARS, "(0, 4194304]"),
    lenient=Range(0, 100 * 2**20, "(0, maxRequestLength]"),
    message=(
        "text_input must be necessary and data type must be string and length in {range}, but the "
        "length of inputs is {value}"
    ),
    required=True,
    ours=(
        "Characters. A list of text items is their concatenation; media items are checked, then "
        "refused by a model that takes text only. With the header `is-recompute: true`: "
        "`promptLength,id,id,...`."
    ),
    documented="string of 1 to 4 Mi characters, or list of items",
    real_server="1 to maxRequestLength Mi UTF-16 units",
    place="body",
)
PARAMETERS_FIELD = Field(
    name="parameters",
    kind="object",
    default_words="no parameters",
    ours="Unknown fields inside and outside are ignored; `null` is the same as absent.",
    documented="object",
    real_server="same",
    place="body",
)

PARAMETERS = (
    Field(
        name="temperature",
        kind="float",
        strict=Range(1e-6, FLOAT_MAX, "(1e-06,3.40282e+38]"),
        lenient=Range(0.0, FLOAT_MAX, "(0.0,3.40282e+38]"),
        message=_GOT.format("temperature"),
        default_words="the model's, else 1.0",
        documented="greater than 1e-6; 1.0",
        real_server="(0.0, 3.40282e+38]",
    ),
    Field(
        name="top_k",
        kind="integer",
        strict=_POSITIVE_INT,
        lenient=Range(0, INT32_MAX, "[0,2147483647]", low_open=False),
        message="Parameter top_k must be in {range}, got {value}",
        default_words="the model's yaml, else 0 (off)",
        ours="At or above the vocabulary size: the vocabulary size. 0 (lenient): off.",
        documented="(0, 2147483647]; ms: the yaml, else 0; atb: generation_config.json, else 1000",
        real_server="[0, 2147483647], cut to the model's own top_k or 1000",
    ),
    Field(
        name="top_p",
        kind="float",
        strict=Range(1e-6, 1.0, "(1e-06,1.0]"),
        lenient=Range(0.0, 1.0, "(0.0,1.0]"),
        message=_GOT.format("top_p"),
        default_words="the model's, else 1.0",
        documented="(1e-6, 1.0]; 1.0",
        real_server="(0.0, 1.0]",
    ),
    Field(
        name="typical_p",
        kind="float",
        strict=Range(0.0, 1.0, "(0.0,1.0]"),
        message=_GOT.format("typical_p"),
        default_words="off",
        ours="Applied: locally typical sampling.",
        documented="(0.0, 1.0]; not supported",
        real_server="checked, then ignored",
    ),
    Field(
        name="do_sample",
        kind="boolean",
        default_words=(
            "true if temperature, top_k, top_p or typical_p is given, else the model's, else false"
        ),
        documented="boolean; decided by the other parameters",
        real_server="true if temperature, top_k or top_p is given, else the model's, else false",
    ),
    Field(
        name="seed",
        kind="unsigned",
        strict=Range(0, UINT64_MAX, "(0, 18446744073709551615]"),
        lenient=_SIZE_T,
        message=_GOT.format("seed"),
        default_words="random",
        ours="All 64 bits count; no warning near the maximum.",
        documented="(0, 18446744073709551615]",
        real_server="[0, 9223372036854775807], modulo 2^32",
    ),
    Field(
        name="repetition_penalty",
        kind="float",
        strict=Range(0.0, FLOAT_MAX, "(0.0, 3.40282e+38]"),
        message="Parameter 'repetition_penalty' must be in {range}, got {value}.",
        default_words="the model's, else 1.0",
        ours="Over prompt and output tokens; also without sampling.",
        documented="greater than 0.0; 1.0",
        real_server="(0.0, 3.40282e+38]",
    ),
    Field(
        name="watermark",
        kind="boolean",
        default=False,
        ours="Applied: a keyed green-list watermark.",
        documented="boolean; not supported",
        real_server="checked, then ignored",
    ),
    Field(
        name="priority",
        kind="unsigned",
        strict=Range(1, 5, "[1,5]", low_open=False),
        message=_GOT.format("priority"),
        default=5,
        ours="1 is served first; a waiting request is raised as it ages.",
        documented="[1, 5]; 5",
        real_server="same",
    ),
    Field(
        name="max_new_tokens",
        kind="integer",
        strict=_POSITIVE_INT,
        message=_GOT.format("max_new_tokens"),
        default=20,
        ours="Cut to max_iter_times and to what the sequence length leaves; never an error.",
        documented="(0, 2147483647]; 20",
        real_server="same",
    ),
    Field(
        name="details",
        kind="boolean",
        default=False,
        documented="boolean; false",
        real_server="same",
    ),
    Field(
        name="batch_size",
        kind="integer",
        strict=_POSITIVE_INT,
        message=_GOT.format("batch_size"),
        default=1,
        ours="Checked, without effect: `details.batch_size` is the step's own.",
        documented="(0, 2147483647]; 1",
        real_server="checked, then ignored",
    ),
    Field(
        name="timeout",
        kind="unsigned",
        strict=Range(0, 3600, "(0,3600]"),
        lenient=Range(0, 65535, "(0,65535]"),
        message=_GOT.format("timeout"),
        lenient_message=(
            "Parameter timeout must be strictly positive and small than 65535 seconds, got {value}."
        ),
        default=600,
        ours="Seconds. In a stream they start again with every event.",
        documented="(0, 3600]; 600",
        real_server="[1, 65535]; 65535",
    ),
    Field(
        name="firstTokenCost",
        kind="unsigned",
        strict=_SIZE_T,
        message=(
            "Parameter firstTokenCost exceeds the max value of type size_t, must be in {range}, "
            "got {value}."
        ),
        default_words="none",
        ours="Milliseconds. Required with `is-recompute: true` once tokens were generated.",
        documented="[0, 18446744073709551615]; PD recompute only",
        real_server="read only with `is-recompute: true`",
    ),
    Field(
        name="decodeTime",
        kind="array",
        strict=_SIZE_T,
        message=(
            "Parameter decodeTime exceeds the max value of type size_t, must be in {range}, got "
            "{value}."
        ),
        each=True,
        default_words="none",
        ours=(
            "Milliseconds, one for every generated token but the first. Required with "
            "`is-recompute: true` once two tokens were generated."
        ),
        documented="array of [0, 18446744073709551615]; PD recompute only",
        real_server="read only with `is-recompute: true`",
    ),
)
BODY = (ID, TEXT_INPUT, PARAMETERS_FIELD)
# What the protocol itself gives a field that is absent.
DEFAULTS = {row.name: row.default for row in PARAMETERS if row.default is not None}
