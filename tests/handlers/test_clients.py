"""Clients people use read the stream, and joined it is the whole reply."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterable

import aiohttp
import httpx
import pytest
import requests

from mindstream.handlers.testing import Server

# Characters at which careless line readers cut, and ones of two to four bytes.
TEXT = 'Zoë\n\r\n中文 😀 "q" \\ \x85 \u2028 end'
BODY = {"id": "a", "text_input": TEXT, "parameters": {"details": True, "max_new_tokens": 99}}
JSON_BODY = json.dumps(BODY)


def with_requests(url: str) -> list[str]:
    with requests.post(url, json=BODY, stream=True, timeout=20) as reply:
        # Its own decoding takes text without a charset for Latin-1, whatever the event rules say.
        return [line.decode() for line in reply.iter_lines()]


def with_httpx(url: str) -> list[str]:
    with httpx.stream("POST", url, json=BODY, timeout=20) as reply:
        return list(reply.iter_lines())


def with_aiohttp(url: str) -> list[str]:
    async def read() -> list[str]:
        async with aiohttp.ClientSession() as session, session.post(url, json=BODY) as reply:
            return [line.decode().removesuffix("\n") async for line in reply.content]

    return asyncio.run(read())


def with_urllib(url: str) -> list[str]:
    request = urllib.request.Request(url, JSON_BODY.encode(), method="POST")
    with urllib.request.urlopen(request, timeout=20) as reply:
        return [line.decode().removesuffix("\n") for line in reply]


def with_curl(url: str) -> list[str]:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    command = [curl, "-sSN", "--max-time", "20", url, "-d", JSON_BODY]
    output = subprocess.run(command, capture_output=True, check=True).stdout
    return output.decode().split("\n")


@pytest.mark.parametrize(
    "client", [with_requests, with_httpx, with_aiohttp, with_urllib, with_curl]
)
def test_a_client_reads_the_stream(server: Server, client: Callable[[str], list[str]]) -> None:
    lines = client(f"{server.url}/v2/models/echo/generate_stream")
    data = [line for line in lines if line]
    assert all(line.startswith("data:{") for line in data)
    events = [json.loads(line.removeprefix("data:")) for line in data]
    assert len(events) == len(TEXT.encode())
    whole = server.generate(BODY).json()
    assert whole["text_output"] == TEXT
    assert "".join(event["text_output"] for event in events) == TEXT
    assert events[-1]["details"]["finish_reason"] == "length"


def sse_events(lines: Iterable[str]) -> list[str]:
    """The data of each event, by the rules of the HTML standard for event streams."""
    events: list[str] = []
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                events.append("\n".join(data))
            data = []
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
    return events


def test_an_event_stream_parser_reads_it(server: Server) -> None:
    raw = server.stream(BODY).body.decode()
    # The standard's line ends, not Python's.
    events = [json.loads(event) for event in sse_events(re.split(r"\r\n|\n|\r", raw))]
    assert "".join(event["text_output"] for event in events) == TEXT


def test_the_replaced_servers_own_clients_read_it(server: Server) -> None:
    """Its public clients cut at empty lines, or strip `data:` and cut between `}` and `data:{`."""
    raw = server.stream(BODY).body.decode()
    cut = [json.loads(part.removeprefix("data:")) for part in raw.split("\n\n") if part]
    stripped = raw.strip().lstrip("data:")  # noqa: B005 - a set of characters, as that client does
    joined = "[" + re.sub(r"}\s*data:{", "},{", stripped) + "]"
    assert json.loads(joined) == cut
    assert "".join(event["text_output"] for event in cut) == TEXT
