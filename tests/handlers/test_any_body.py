"""No body can cause a 5xx, a traceback or a hang: JSON of every kind, and what is not JSON."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tornado.httputil import HTTPHeaders

from mindstream.handlers import triton, triton_fields
from mindstream.handlers.base import ApiHandler
from mindstream.handlers.error_map import reply_for
from mindstream.handlers.json_body import MAX_VALUES, parse_json_object
from mindstream.handlers.state import ServerState
from mindstream.handlers.testing import Server, read_reply, request_bytes
from mindstream.plugin.errors import InvalidRequest, RequestError
from mindstream.plugin.testing import ScriptedBackend, scripted_service

MUTATED_BODIES = 40_000

NAMES = [row.name for row in (*triton_fields.BODY, *triton_fields.PARAMETERS)]
# Values as they stand in a body, many of which no JSON writer would make.
LITERALS = [
    *("null", "true", "false", "0", "-0", "1", "-1", "5.0", "1e400", "-1e400", "1e-400", "NaN"),
    *("Infinity", "-Infinity", "1" * 4000, "1" * 5000, "-" + "9" * 400, "0." + "0" * 5000 + "1"),
    *("18446744073709551615", "18446744073709551616", "2147483648", "0.1", "1E2", "01", "+1", "."),
    *('""', '"a"', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\x00"', '"\\x"', '"é中😀"'),
    *("[]", "{}", "[[]]", '[{"type":"text","text":"x"}]', '[{"type":"image_url"}]', "[null]"),
    *("[" * 11 + "]" * 11, "[" * 5000 + "]" * 5000, "[" * 5000, '{"a":' * 12 + "1" + "}" * 12),
    *(
        '{"id":"a","id":5}',
        "[1,2,3]",
        "[-1]",
        "[1.5]",
        '"1,2,3"',
        '"0,1"',
        '"999,1"',
        '"1,,2"',
        '"1,256"',
    ),
]


class FakeHandler:
    """What reading a request takes from its handler."""

    def __init__(self, state: ServerState, body: bytes, headers: dict[str, str]) -> None:
        self.state = state
        self.request = self
        self.headers = HTTPHeaders(headers)
        self.request_id = "-"
        self._body = body

    async def json_body(self) -> dict[str, Any]:
        return parse_json_object(self._body, 10)

    async def off_loop(self, function: Any, *args: Any) -> Any:
        return function(*args)


class Reader:
    """The whole reading of a request, without a socket."""

    def __init__(self) -> None:
        service = scripted_service(ScriptedBackend())
        asyncio.run(service.start())
        self._state = ServerState([service])

    async def read(self, body: bytes, **headers: str) -> int:
        """The status it would have: 200, or that of the error it raised."""
        handler = cast(ApiHandler, FakeHandler(self._state, body, headers))
        try:
            await triton.read_text_call(handler, "echo", None)
        except RequestError as error:
            return reply_for(error).status
        return 200


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


def random_body(random: random.Random) -> bytes:
    """An object of known and unknown keys with odd values, now and then damaged."""

    def members(count: int) -> str:
        keys = random.choices([*NAMES, "other", "\\ud800", ""], k=count)
        return ",".join(f'"{key}":{random.choice(LITERALS)}' for key in keys)

    text = random.choice(['"text_input":"x",', '"text_input":[{"text":"x"}],', ""])
    parameters = f'"parameters":{{{members(random.randrange(4))}}}'
    more = members(random.randrange(3))
    body = bytearray(f"{{{text}{parameters}{',' if more else ''}{more}}}".encode())
    for _ in range(random.choice([0, 0, 0, 1, 2])):
        body[random.randrange(len(body))] = random.randrange(256)
    return bytes(body)


def test_odd_and_damaged_bodies(reader: Reader) -> None:
    generator = random.Random(20261130)

    async def read_all() -> set[int]:
        return {
            await reader.read(
                random_body(generator), **{"is-recompute": generator.choice(["true", "no"])}
            )
            for _ in range(MUTATED_BODIES)
        }

    assert asyncio.run(read_all()) == {200, 422, 424}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**400), max_value=10**400)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "id": json_values,
        "text_input": st.text(max_size=40) | json_values,
        "parameters": st.dictionaries(st.sampled_from(NAMES) | st.text(), json_values)
        | json_values,
    },
)


@given(body=bodies, recompute=st.sampled_from(["true", "no"]))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_value_in_any_field(reader: Reader, body: Any, recompute: str) -> None:
    data = json.dumps(body).encode()
    status = asyncio.run(reader.read(data, **{"is-recompute": recompute}))
    assert status in (200, 422, 424)


@given(body=st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes(reader: Reader, body: bytes) -> None:
    assert asyncio.run(reader.read(body)) in (200, 422)


def test_over_real_sockets(server: Server) -> None:
    generator = random.Random(1130)
    with server.connect() as connection:
        for path in ("generate", "generate_stream", "infer", "stopInfer") * 100:
            body = random_body(generator)
            raw = request_bytes("POST", f"/v2/models/echo/{path}", body)
            connection.sendall(raw.replace(b"Connection: close\r\n", b""))
            assert read_reply(connection).status in (200, 404, 422, 424), body
    assert server.generate({"text_input": "alive"}).json()["text_output"] == "alive"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"\xef\xbb\xbf{}",
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\\ud800"}',
        b'{"a":NaN}',
        b'{"a":1e400}',
        b'{"a":' + b"1" * 5000 + b"}",
        b"{} {}",
        b"{'a':1}",
        b'{"a":1,}',
    ],
)
def test_what_is_no_json_object_here(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^Failed to parse request context to json: "):
        parse_json_object(body, 10)


def test_equal_keys_the_last_one_counts() -> None:
    assert parse_json_object(b'{"a":1,"a":2,"b":{"c":1,"c":[]}}', 10) == {"a": 2, "b": {"c": []}}


@pytest.mark.parametrize("open_close", ["[]", '{"a":}'])
@pytest.mark.parametrize("limit", [10, 37, 100])
def test_depth_at_the_limit(open_close: str, limit: int) -> None:
    opening, closing = open_close[:-1], open_close[-1]

    def nested(depth: int) -> bytes:
        inner = (depth - 1) * opening + "1" + (depth - 1) * closing
        return f'{{"x":{inner}}}'.encode()

    parse_json_object(nested(limit), limit)
    with pytest.raises(InvalidRequest, match=f"deeper than {limit} levels"):
        parse_json_object(nested(limit + 1), limit)


def test_a_body_of_very_many_values_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} values"):
        parse_json_object(b'{"a":[' + b"[]," * MAX_VALUES + b"1]}", 10)
