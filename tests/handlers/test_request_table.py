"""Every field of the request table: just inside, just outside, wrong type, null, absent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from mindstream.handlers import triton_fields as table
from mindstream.handlers.field_table import Field, Mode
from mindstream.handlers.testing import Server
from mindstream.handlers.triton_request import read_id, read_parameters
from mindstream.plugin.errors import InvalidRequest

# Written by hand from the documentation, not taken from the table.
FLOAT_MAX = 3.4028234663852886e38
ABOVE_FLOAT_MAX = 3.402823466385289e38
INSIDE: dict[str, dict[Mode, list[Any]]] = {
    "temperature": {
        "strict": [1.0000001e-6, 1, 2.5, FLOAT_MAX],
        "lenient": [5e-324, 1e-6, 1, FLOAT_MAX],
    },
    "top_k": {"strict": [1, 2147483647], "lenient": [0, 1, 2147483647]},
    "top_p": {"strict": [1.0000001e-6, 1, 1.0], "lenient": [5e-324, 1e-6, 1]},
    "typical_p": {"strict": [5e-324, 0.5, 1, 1.0], "lenient": [5e-324, 1]},
    "do_sample": {"strict": [True, False], "lenient": [True, False]},
    "seed": {"strict": [1, 2**63, 2**64 - 1], "lenient": [0, 1, 2**64 - 1]},
    "repetition_penalty": {"strict": [5e-324, 1, 2.5, FLOAT_MAX], "lenient": [5e-324, FLOAT_MAX]},
    "watermark": {"strict": [True, False], "lenient": [True, False]},
    "priority": {"strict": [1, 2, 3, 4, 5], "lenient": [1, 5]},
    "max_new_tokens": {"strict": [1, 2147483647], "lenient": [1, 2147483647]},
    "details": {"strict": [True, False], "lenient": [True, False]},
    "batch_size": {"strict": [1, 2147483647], "lenient": [1, 2147483647]},
    "timeout": {"strict": [1, 3600], "lenient": [1, 3600, 65535]},
    "firstTokenCost": {"strict": [0, 2**64 - 1], "lenient": [0, 2**64 - 1]},
    "decodeTime": {"strict": [[], [0, 2**64 - 1]], "lenient": [[], [1]]},
}
OUTSIDE: dict[str, dict[Mode, list[Any]]] = {
    "temperature": {
        "strict": [1e-6, 0, 0.0, -0.0, -1, ABOVE_FLOAT_MAX, 10**400],
        "lenient": [0, -5e-324, ABOVE_FLOAT_MAX, 10**400],
    },
    "top_k": {"strict": [0, -1, 2147483648, 10**40], "lenient": [-1, 2147483648]},
    "top_p": {"strict": [1e-6, 0, 1.0000000000000002, 2, -1], "lenient": [0, 1.0000000000000002]},
    "typical_p": {"strict": [0, -1.0, 1.0000000000000002], "lenient": [0, -1.0, 2]},
    "do_sample": {"strict": [], "lenient": []},
    "seed": {"strict": [0, 2**64, 10**40], "lenient": [2**64]},
    "repetition_penalty": {"strict": [0, -1, ABOVE_FLOAT_MAX, 10**400], "lenient": [0.0]},
    "watermark": {"strict": [], "lenient": []},
    "priority": {"strict": [0, 6, 2**64], "lenient": [0, 6]},
    "max_new_tokens": {"strict": [0, -1, 2147483648], "lenient": [0, 2147483648]},
    "details": {"strict": [], "lenient": []},
    "batch_size": {"strict": [0, -1, 2147483648], "lenient": [0, 2147483648]},
    "timeout": {"strict": [0, 3601, 65535], "lenient": [0, 65536]},
    "firstTokenCost": {"strict": [2**64], "lenient": [2**64]},
    "decodeTime": {"strict": [[2**64], [1, 2**64]], "lenient": [[2**64]]},
}
NUMBERS = {"temperature", "top_p", "typical_p", "repetition_penalty"}
INTEGERS = {"top_k", "max_new_tokens", "batch_size"}
UNSIGNED = {"seed", "priority", "timeout", "firstTokenCost"}
BOOLEANS = {"do_sample", "watermark", "details"}
WRONG_TYPE: dict[str, list[Any]] = {
    **{name: ["1", True, False, [], {}, [1]] for name in NUMBERS},
    **{name: ["1", True, False, [], {}, 5.0, 1e3] for name in INTEGERS},
    **{name: ["1", True, False, [], {}, 5.0, -1] for name in UNSIGNED},
    **{name: ["true", 0, 1, 1.0, [], {}] for name in BOOLEANS},
    "decodeTime": ["1", True, 1, 1.0, {}, [-1], [1.0], [True], ["1"], [None], [[]]],
}
TYPE_WORD = {
    **dict.fromkeys(NUMBERS, "float"),
    **dict.fromkeys(INTEGERS, "integer"),
    **dict.fromkeys(UNSIGNED, "unsigned"),
    **dict.fromkeys(BOOLEANS, "boolean"),
}
MODES: tuple[Mode, ...] = ("strict", "lenient")


def named(row: Field) -> str:
    return row.name


every_field = pytest.mark.parametrize("row", table.PARAMETERS, ids=named)
every_mode = pytest.mark.parametrize("mode", MODES)


def read(name: str, value: Any, mode: Mode) -> Any:
    """The value behind a real JSON round trip, so that the test sends what a client can send."""
    return read_parameters(json.loads(json.dumps({name: value})), mode).values.get(name)


def test_the_table_has_the_documented_fields_in_the_order_of_the_checks() -> None:
    assert [row.name for row in table.PARAMETERS] == [
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "do_sample",
        "seed",
        "repetition_penalty",
        "watermark",
        "priority",
        "max_new_tokens",
        "details",
        "batch_size",
        "timeout",
        "firstTokenCost",
        "decodeTime",
    ]


@every_field
@every_mode
def test_just_inside(row: Field, mode: Mode) -> None:
    for value in INSIDE[row.name][mode]:
        taken = read(row.name, value, mode)
        assert taken == value
        assert type(taken) is (float if row.name in NUMBERS else type(value))


@every_field
@every_mode
def test_just_outside(row: Field, mode: Mode) -> None:
    for value in OUTSIDE[row.name][mode]:
        with pytest.raises(InvalidRequest) as refused:
            read(row.name, value, mode)
        message = str(refused.value)
        assert row.name in message
        assert repr(value if not isinstance(value, list) else value[-1])[:40] in message
        assert len(message) < 250


@every_field
@every_mode
def test_wrong_type(row: Field, mode: Mode) -> None:
    for value in WRONG_TYPE[row.name]:
        with pytest.raises(InvalidRequest) as refused:
            read(row.name, value, mode)
        word = TYPE_WORD.get(row.name, "unsigned" if isinstance(value, list) else "array")
        assert str(refused.value) == f"{row.name} must be {word} type."


@every_field
@every_mode
def test_null_is_absent(row: Field, mode: Mode) -> None:
    assert read(row.name, None, mode) is None
    assert read_parameters({}, mode).values == {}


@every_field
@every_mode
def test_absent(row: Field, mode: Mode) -> None:
    """The documented defaults; what the model or the request decides is left open."""
    documented = {
        "watermark": False,
        "priority": 5,
        "max_new_tokens": 20,
        "details": False,
        "batch_size": 1,
        "timeout": 600,
    }
    for given in (None, {}, {row.name: None}):
        value = read_parameters(given, mode).get(row.name)
        expected = documented.get(row.name)
        assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "value", "mode", "message"),
    [
        ("temperature", 0, "lenient", "Parameter temperature must be in (0.0,3.40282e+38], got 0."),
        ("top_k", 0, "strict", "Parameter top_k must be in (0,2147483647], got 0"),
        ("top_p", 1.5, "lenient", "Parameter top_p must be in (0.0,1.0], got 1.5."),
        ("typical_p", 0, "strict", "Parameter typical_p must be in (0.0,1.0], got 0."),
        ("seed", 0, "strict", "Parameter seed must be in (0, 18446744073709551615], got 0."),
        (
            "repetition_penalty",
            0,
            "strict",
            "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got 0.",
        ),
        ("priority", 6, "strict", "Parameter priority must be in [1,5], got 6."),
        (
            "max_new_tokens",
            0,
            "strict",
            "Parameter max_new_tokens must be in (0,2147483647], got 0.",
        ),
        ("batch_size", 0, "strict", "Parameter batch_size must be in (0,2147483647], got 0."),
        ("timeout", 3601, "strict", "Parameter timeout must be in (0,3600], got 3601."),
        (
            "timeout",
            0,
            "lenient",
            "Parameter timeout must be strictly positive and small than 65535 seconds, got 0.",
        ),
    ],
)
def test_messages(name: str, value: Any, mode: Mode, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(name, value, mode)
    assert str(refused.value) == message


@every_mode
def test_a_text_of_any_bound_agrees_with_its_numbers(mode: Mode) -> None:
    """A range's text is written by hand; it must not say anything else than its numbers."""
    for row in table.PARAMETERS:
        if (bounds := row.range(mode)) is None:
            continue
        low, high = bounds.text.strip("()[] ").split(",")
        assert math.isclose(float(low), bounds.low, rel_tol=1e-5)
        assert math.isclose(float(high), bounds.high, rel_tol=1e-5)
        assert bounds.text.startswith("(") is bounds.low_open


@pytest.mark.parametrize("good", ["a", "A-z_0", "x" * 256])
def test_id_inside(good: str) -> None:
    assert read_id({"id": good}, "strict") == good


@pytest.mark.parametrize("bad", ["", "x" * 257, "a b", "a.b", "é", "a\n", "٣"])
def test_id_outside(bad: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^The id can contain only digits, letters"):
        read_id({"id": bad}, "strict")


@pytest.mark.parametrize("bad", [1, True, [], {}, 1.5])
def test_id_wrong_type(bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^id must be string type\.$"):
        read_id({"id": bad}, "strict")


@pytest.mark.parametrize("body", [{}, {"id": None}])
def test_id_absent(body: dict[str, Any]) -> None:
    assert read_id(body, "strict") is None


@pytest.mark.parametrize(
    ("text_input", "message"),
    [
        (None, "The text_input not found"),
        ([], "Parameter text_input arr is empty"),
        (5, "The type of text_input is abnormal. The requestId is r1"),
        (True, "The type of text_input is abnormal. The requestId is r1"),
        ({}, "The type of text_input is abnormal. The requestId is r1"),
        (
            "",
            "text_input must be necessary and data type must be string and length in (0, 4194304], "
            "but the length of inputs is 0",
        ),
        ([{"type": "text", "text": 5}], "Request param text must be string"),
        ([{"type": "image_url", "image_url": None}], "Request param image_url null"),
    ],
)
def test_text_input_refused(server: Server, text_input: Any, message: str) -> None:
    reply = server.generate({"id": "r1", "text_input": text_input})
    assert (reply.status, reply.json()) == (
        422,
        {"error": message, "error_type": "Input Validation Error"},
    )


def test_text_input_lenient_names_the_deployments_own_bound(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(validation="lenient", max_request_length=2)
    reply = server.generate({"text_input": ""})
    assert "length in (0, 2097152], but the length of inputs is 0" in reply.json()["error"]


def test_text_input_at_its_longest(start_server: Callable[..., Server]) -> None:
    server = start_server(max_iter_times=4)
    longest = 4 * 2**20
    too_long = server.generate({"text_input": "x" * (longest + 1)})
    assert too_long.status == 422
    assert "(0, 4194304], but the length of inputs is 4194305" in too_long.json()["error"]
    # One byte a token: four times what any tokenizer of the protocol may give.
    inside = server.generate({"text_input": "x" * longest})
    assert inside.json()["error"] == (
        "text_input token length must be in (0, 1048576], but got 4194304"
    )


def test_a_list_of_texts_is_their_concatenation(server: Server) -> None:
    items = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    assert server.generate({"text_input": items}).json()["text_output"] == "abcd"


@pytest.mark.parametrize("bad", ["x", 1, True, []])
def test_parameters_wrong_type(server: Server, bad: Any) -> None:
    reply = server.generate({"text_input": "x", "parameters": bad})
    assert (reply.status, reply.json()["error"]) == (422, "parameters must be object type.")


@pytest.mark.parametrize("body", [{"text_input": "x"}, {"text_input": "x", "parameters": None}])
def test_parameters_absent(server: Server, body: Any) -> None:
    assert server.generate(body).json()["text_output"] == "x"


def test_the_first_fault_in_the_real_servers_order_is_told(server: Server) -> None:
    faults: list[tuple[str, Any, str]] = [
        ("id", "!", "The id can contain"),
        ("text_input", None, "The text_input not found"),
        ("temperature", 0, "temperature"),
        ("top_k", 0, "top_k"),
        ("top_p", 0, "top_p"),
        ("typical_p", 0, "typical_p"),
        ("do_sample", 0, "do_sample"),
        ("seed", 0, "seed"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("watermark", 0, "watermark"),
        ("priority", 0, "priority"),
        ("max_new_tokens", 0, "max_new_tokens"),
        ("details", 0, "details"),
        ("batch_size", 0, "batch_size"),
        ("timeout", 0, "timeout"),
    ]
    for first in range(len(faults)):
        body: dict[str, Any] = {"id": "ok", "text_input": "x", "parameters": {}}
        for name, bad, _ in reversed(faults[first:]):
            place = body if name in body else body["parameters"]
            place[name] = bad
        assert faults[first][2] in server.generate(body).json()["error"]
