"""From parsed items to decoded media, over real sockets and real files."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Any

import pytest

from mindstream.plugin.errors import InvalidRequest
from mindstream.plugin.media.addresses import IPAddress
from mindstream.plugin.media.fetch import FetchRules, allowed_domains
from mindstream.plugin.media.formats import Kind
from mindstream.plugin.media.items import TextItem, parse_items
from mindstream.plugin.media.load import Media, load, rules_of
from mindstream.plugin.model_config import MediaConfig

Samples = dict[str, tuple[Kind, bytes]]
Respond = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

LOOPBACK = ip_address("127.0.0.1")
NAME = "media.example"
PREFIX = "[InferTokenizer::DownloadUrl] Download fail: ValueError: text_input[0]."


async def to_loopback(host: str, port: int) -> list[IPAddress]:
    return [LOOPBACK]


# What a test server needs: names that lead to loopback, and a policy that lets them.
LOCAL = FetchRules(
    allowed_domains=frozenset({NAME, "127.0.0.1"}),
    connect_timeout=5,
    read_timeout=5,
    refuse_address=lambda address: None,
    resolve=to_loopback,
)


@asynccontextmanager
async def host(
    respond: Respond, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A real server: its port, and the head of every request it got."""
    heads: list[bytes] = []
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await respond(reader, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], heads
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer(body: bytes, status: str = "200 OK", *headers: str) -> Respond:
    """A complete reply with a Content-Length."""

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)

    return respond


async def load_one(
    value: str, rules: FetchRules | None = None, key: str = "image_url", local_dir: str = "/none/"
) -> bytes:
    """The content of one item, by way of everything."""
    items = parse_items([{"type": key, key: value}])
    config = MediaConfig(local_dir=local_dir)
    async with load(items, config, rules) as (media,):
        assert isinstance(media, Media)
        data = media.file.read()
        assert len(data) == media.size
        return data


async def refusal(value: str, rules: FetchRules | None = None, key: str = "image_url") -> str:
    with pytest.raises(InvalidRequest) as caught:
        await load_one(value, rules, key)
    text = str(caught.value)
    assert text.startswith(PREFIX + key)
    return text


async def refusal_from(respond: Respond, rules: FetchRules = LOCAL, path: str = "/a.png") -> str:
    async with host(respond) as (port, _):
        return await refusal(f"http://{NAME}:{port}{path}", rules)


# --- what works


def test_every_format_by_web_file_and_name(samples: Samples, tmp_path: Path) -> None:
    async def run() -> None:
        for extension, (kind, data) in samples.items():
            path = tmp_path / f"a.{extension}"
            path.write_bytes(data)
            assert await load_one(str(path), key=kind.value, local_dir=str(tmp_path)) == data
            async with host(answer(data)) as (port, heads):
                for name in (f"a.{extension}?sig=%2Fa+b", "without"):
                    url = f"http://{NAME}:{port}/{name}"
                    assert await load_one(url, LOCAL, kind.value) == data
            head = heads[0].decode().split("\r\n")
            assert head[0] == f"GET /a.{extension}?sig=%2Fa+b HTTP/1.1"
            assert f"Host: {NAME}:{port}" in head

    asyncio.run(run())


def test_base64(samples: Samples) -> None:
    data = samples["jpg"][1]
    text = base64.b64encode(data).decode()
    assert asyncio.run(load_one(text)) == data
    assert asyncio.run(load_one("data:image/jpeg;base64," + text)) == data
    assert "valid base64" in asyncio.run(refusal("no base64!"))
    assert "valid base64" in asyncio.run(refusal("/data/file_without_ending"))
    assert "named as PNG but" in asyncio.run(refusal("data:image/png;base64," + text))


def test_order_is_kept_and_files_are_closed(samples: Samples, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(samples["wav"][1])
    wav = {"type": "audio_url", "audio_url": f"file://{tmp_path}/a.wav"}
    items = parse_items([wav, {"type": "text", "text": "and"}, wav])

    async def run() -> tuple[Any, ...]:
        async with load(items, MediaConfig(local_dir=str(tmp_path))) as loaded:
            return loaded

    first, text, last = asyncio.run(run())
    assert text == TextItem("and")
    assert first.file.closed and last.file.closed


def test_chunked_reply(samples: Samples) -> None:
    data = samples["png"][1]

    async def chunked(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in data:
            writer.write(b"1\r\n%c\r\n" % byte)
        writer.write(b"0\r\n\r\n")

    async def run() -> bytes:
        async with host(chunked) as (port, _):
            return await load_one(f"http://{NAME}:{port}/a.png", LOCAL)

    assert asyncio.run(run()) == data


# --- where a fetch may go


def test_without_the_variable_every_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLOWED_MEDIA_DOMAINS_ENV", raising=False)
    text = asyncio.run(refusal(f"http://{NAME}/a.png"))
    assert "set ALLOWED_MEDIA_DOMAINS_ENV to the hosts" in text


def test_the_variable_lists_whole_host_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOWED_MEDIA_DOMAINS_ENV", " Upload.Example. ,10.1.2.3,, [::1]")
    rules = rules_of(MediaConfig(connect_timeout=2, read_timeout=3))
    assert rules.allowed_domains == frozenset({"upload.example", "10.1.2.3", "::1"})
    assert (rules.connect_timeout, rules.read_timeout) == (2, 3)
    for name in ("x.upload.example", "example", "upload.example.evil.example"):
        assert f"host {name}, which" in asyncio.run(refusal(f"http://{name}/a.png"))
    assert allowed_domains({"ALLOWED_MEDIA_DOMAINS_ENV": ""}) == frozenset()


@pytest.mark.parametrize(
    ("literal", "reason"),
    [
        ("127.0.0.1", "a loopback address (127.0.0.1)"),
        ("127.1", "a loopback address (127.0.0.1)"),
        ("2130706433", "a loopback address (127.0.0.1)"),
        ("0x7f000001", "a loopback address (127.0.0.1)"),
        ("localhost", "a loopback address"),
        ("0.0.0.0", "an unspecified address"),
        ("169.254.169.254", "a link-local address"),
        ("10.0.0.1", "a private address"),
        ("[::1]", "a loopback address (::1)"),
        ("[::ffff:127.0.0.1]", "an IPv4-mapped address"),
        ("[64:ff9b::7f00:1]", "a NAT64 address"),
    ],
)
def test_listed_but_not_public(literal: str, reason: str) -> None:
    rules = FetchRules(allowed_domains=frozenset({literal.strip("[]")}))
    assert reason in asyncio.run(refusal(f"http://{literal}:1/a.png", rules))


def test_one_private_address_among_public_ones_is_enough() -> None:
    async def both(host: str, port: int) -> list[IPAddress]:
        return [ip_address("93.184.216.34"), ip_address("10.0.0.1")]

    rules = FetchRules(allowed_domains=frozenset({NAME}), resolve=both)
    assert "a private address (10.0.0.1)" in asyncio.run(refusal(f"http://{NAME}/a.png", rules))


def test_a_name_is_resolved_once_and_the_connection_keeps_that_address(samples: Samples) -> None:
    """A name that answers with a good address first and another one later gains nothing."""
    answers = [LOOPBACK, IPv4Address("127.0.0.2")]
    judged: list[IPAddress] = []

    async def rebinding(host: str, port: int) -> list[IPAddress]:
        return [answers.pop(0)]

    def judge(address: IPAddress) -> str | None:
        judged.append(address)
        return None

    async def run() -> bytes:
        rules = replace(LOCAL, resolve=rebinding, refuse_address=judge)
        async with host(answer(samples["png"][1])) as (port, _):
            return await load_one(f"http://{NAME}:{port}/a.png", rules)

    def no_lookup(*args: object, **named: object) -> None:
        raise AssertionError(f"resolved again: {args}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", no_lookup)
        assert asyncio.run(run()) == samples["png"][1]
    assert judged == [LOOPBACK]
    assert len(answers) == 1


def test_redirects_are_refused_and_their_target_is_not_asked() -> None:
    async def run() -> None:
        async with host(answer(b"")) as (target, heads):
            for status in ("301 Moved", "302 Found", "307 Again", "308 There"):
                location = f"Location: http://{NAME}:{target}/a.png"
                text = await refusal_from(answer(b"", status, location))
                assert "a redirect, which is not followed" in text
            assert heads == []

    asyncio.run(run())


def test_no_proxy_of_the_environment_is_used(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def run() -> bytes:
        async with host(answer(samples["png"][1])) as (port, _):
            return await load_one(f"http://{NAME}:{port}/a.png", LOCAL)

    assert asyncio.run(run()) == samples["png"][1]


def test_tls_is_verified_against_the_name_not_the_address(samples: Samples) -> None:
    pem = Path(__file__).with_name("media_example.pem")
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(pem)
    trusting = replace(LOCAL, ssl_context=ssl.create_default_context(cafile=str(pem)))

    async def run() -> None:
        async with host(answer(samples["png"][1]), server_side) as (port, _):
            assert await load_one(f"https://{NAME}:{port}/a.png", trusting) == samples["png"][1]
            # Right authority, wrong name; then right name, unknown authority.
            text = await refusal(f"https://127.0.0.1:{port}/a.png", trusting)
            assert "certificate is not valid" in text
            text = await refusal(f"https://{NAME}:{port}/a.png", LOCAL)
            assert "certificate is not valid" in text

    asyncio.run(run())


# --- hosts that misbehave


@pytest.mark.parametrize(
    ("respond", "part"),
    [
        (answer(b"", "404 Not Found"), "with status 404"),
        (answer(b"", "204 No Content"), "with status 204"),
        (answer(b"<html>", "200 OK", "Content-Type: image/png"), "none of jpg, jpeg, png"),
        (answer(b"x" * 99, "200 OK", "Content-Encoding: gzip"), "in the encoding 'gzip'"),
        (answer(b"x", "nonsense"), f"was not fetched from {NAME}"),
    ],
)
def test_replies_that_are_refused(respond: Respond, part: str) -> None:
    assert part in asyncio.run(refusal_from(respond))


def test_a_declared_size_over_the_limit_is_not_read() -> None:
    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 41943041\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(60)

    text = asyncio.run(refusal_from(respond))
    assert "at most 41943040 bytes, got 41943041" in text


def test_a_reply_without_end_is_cut_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindstream.plugin.media.load.MAX_BYTES", {Kind.IMAGE: 1_000_000})
    sent = 0

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    assert "at most 1000000 bytes, got more" in asyncio.run(refusal_from(respond))
    assert sent < 50_000_000


def test_a_cut_reply_is_refused(samples: Samples) -> None:
    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + samples["png"][1])

    assert f"was not fetched from {NAME}" in asyncio.run(refusal_from(respond))


async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def dripping(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def dripping_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("respond", [silent, dripping, dripping_head])
def test_slow_hosts_end_in_time_and_the_loop_goes_on(respond: Respond) -> None:
    async def run() -> tuple[str, int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.005)
                beats += 1

        beating = asyncio.create_task(beat())
        text = await refusal_from(respond, replace(LOCAL, connect_timeout=0.2, read_timeout=0.1))
        beating.cancel()
        return text, beats

    text, beats = asyncio.run(asyncio.wait_for(run(), 20))
    assert "in time (0.2 s to connect, 0.1 s without a byte, 1.2 s in all)" in text
    assert beats > 3


def test_names_that_do_not_resolve() -> None:
    async def never(host: str, port: int) -> list[IPAddress]:
        await asyncio.sleep(60)
        return []

    async def unknown(host: str, port: int) -> list[IPAddress]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    slow = replace(LOCAL, resolve=never, connect_timeout=0.05)
    assert "was not resolved in 0.05 s" in asyncio.run(refusal(f"http://{NAME}/a.png", slow))
    lost = replace(LOCAL, resolve=unknown)
    assert "which has no address" in asyncio.run(refusal(f"http://{NAME}/a.png", lost))


def test_nobody_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        text = asyncio.run(refusal(f"http://{NAME}:{port}/a.png", LOCAL))
    assert f"was not fetched from {NAME}: " in text


def test_cancelling_ends_a_fetch_at_once() -> None:
    async def run() -> None:
        async with host(silent) as (port, heads):
            task = asyncio.create_task(load_one(f"http://{NAME}:{port}/a.png", LOCAL))
            while not heads:  # noqa: ASYNC110 - the list is the server's, without an event
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 2)

    asyncio.run(run())


def test_all_media_of_a_request_together_are_bounded(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = samples["png"][1]
    (tmp_path / "a.png").write_bytes(data)
    monkeypatch.setattr("mindstream.plugin.media.load.MAX_TOTAL_BYTES", len(data) * 2 - 1)
    items = parse_items([{"image_url": f"{tmp_path}/a.png"}] * 2)

    async def run() -> None:
        async with load(items, MediaConfig(local_dir=str(tmp_path))):
            raise AssertionError("not refused")

    with pytest.raises(InvalidRequest, match=r"text_input\[1\].*at most \d+ bytes"):
        asyncio.run(run())


@pytest.mark.parametrize("missing", ["PIL", "av", "aiohttp"])
def test_without_the_extra_the_refusal_says_what_to_install(missing: str) -> None:
    code = f"""
import asyncio, sys
sys.modules[{missing!r}] = None
from mindstream.plugin.errors import RequestRefused
from mindstream.plugin.media.items import parse_items
from mindstream.plugin.media.load import load
from mindstream.plugin.model_config import MediaConfig
async def run(items):
    async with load(parse_items(items), MediaConfig()) as loaded:
        return len(loaded)
assert asyncio.run(run([dict(text="a")])) == 1
try:
    asyncio.run(run([dict(image_url="/9j/AAAA")]))
except RequestRefused as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == (
        f"Media cannot be read: {missing} is not installed on this server "
        "(pip install 'mindstream[media]').\n"
    )
