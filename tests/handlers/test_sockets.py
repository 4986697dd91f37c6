"""Framing and clients that misbehave, on raw sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mindstream.handlers import base, event_writer
from mindstream.handlers.testing import Server, eventually, read_chunks, read_reply, request_bytes
from mindstream.plugin.errors import BackendFailed
from mindstream.plugin.request import FinishReason

STREAM = "/v2/models/echo/generate_stream"
GENERATE = "/v2/models/echo/generate"
MIB = 2**20


def read_head(stream: Any) -> list[str]:
    lines = []
    while line := stream.readline().strip():
        lines.append(line.decode())
    return lines


def test_headers_and_chunks_of_a_stream(server: Server) -> None:
    """Each event is one chunk of the transfer coding, sent as the token arrives."""
    gate = server.thread.call(server.backend.gate)
    server.backend.enqueue(72, gate, 105, FinishReason.LENGTH)
    with server.connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(request_bytes("POST", STREAM, {"id": "a", "text_input": "x"}))
        head = read_head(stream)
        assert head[0] == "HTTP/1.1 200 OK"
        headers = dict(line.lower().split(": ", 1) for line in head[1:])
        assert headers["content-type"] == "text/event-stream"
        assert headers["transfer-encoding"] == "chunked"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert len(headers["requestuuid"]) == 32
        chunks = read_chunks(stream)
        start = b'data:{"id":"a","model_name":"echo","model_version":null,"text_output":'
        # The first event is here while the model still waits for the second token.
        assert next(chunks) == start + b'"H"}\n\n'
        server.thread.loop.call_soon_threadsafe(gate.set)
        assert next(chunks) == start + b'"i"}\n\n'
        assert list(chunks) == []


@pytest.mark.parametrize("header", [b"", b"Connection: keep-alive\r\n"])
@pytest.mark.parametrize("last", [FinishReason.LENGTH, BackendFailed("It broke.")])
@pytest.mark.parametrize("version", [b"1.0", b"1.2"])  # of the latter Tornado knows nothing
def test_other_versions_get_the_stream_without_chunks(
    server: Server, header: bytes, last: Any, version: bytes
) -> None:
    """Nothing but the end of the connection tells such a client that the stream is complete."""
    server.backend.enqueue("Hi", last)
    body = b'{"id":"a","text_input":"x"}'
    with server.connect() as connection:
        connection.sendall(
            b"POST %b HTTP/%b\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b"
            % (STREAM.encode(), version, header, len(body), body)
        )
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"Transfer-Encoding" not in reply and b"Keep-Alive" not in reply
    assert b'"text_output":"H"}\n\ndata:{"id":"a"' in reply
    assert b'"text_output":"i"}\n\n' in reply and reply.endswith(b"}\n\n")


def test_a_connection_serves_several_requests(server: Server) -> None:
    with server.connect() as connection:
        for text in ("one", "two", "three"):
            raw = request_bytes("POST", GENERATE, {"text_input": text})
            connection.sendall(raw.replace(b"Connection: close\r\n", b""))
            assert read_reply(connection).json()["text_output"] == text


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    texts = ("one", "two", "three")
    raw = b"".join(request_bytes("POST", GENERATE, {"text_input": text}) for text in texts)
    with server.connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(raw.replace(b"Connection: close\r\n", b""))
        for text in texts:
            length = next(int(h.split()[1]) for h in read_head(stream) if "Content-Length" in h)
            assert json.loads(stream.read(length))["text_output"] == text


def test_a_body_in_chunks_and_in_drops(server: Server) -> None:
    body = json.dumps({"text_input": "héllo"}).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with server.connect() as connection:
        for byte in head + b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n":
            connection.send(bytes([byte]))
        assert read_reply(connection).json()["text_output"] == "héllo"


def test_a_body_over_the_limit_is_answered(start_server: Callable[..., Server]) -> None:
    server = start_server(max_request_length=1)
    reply = server.send("POST", GENERATE, b"x" * (MIB + 1))
    text = "Request body too large. Maximum allowed size is 1MB."
    assert (reply.status, reply.json()) == (
        413,
        {"message": text, "error": text, "error_type": "Payload Too Large"},
    )
    assert server.send("POST", GENERATE, b" " * (MIB - 20) + b'{"text_input":"x"}').status == 200


def test_a_chunked_body_over_the_limit_is_answered(start_server: Callable[..., Server]) -> None:
    server = start_server(max_request_length=1)
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    assert server.exchange(head + piece * 17 + b"0\r\n\r\n").status == 413


def test_a_client_that_asks_first_is_spared_the_upload(start_server: Callable[..., Server]) -> None:
    server = start_server(max_request_length=1)
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: "
    assert server.exchange(f"{head}{MIB + 1}\r\n\r\n".encode()).status == 413
    with server.connect() as connection:
        body = b'{"text_input":"x"}'
        connection.sendall(f"{head}{len(body)}\r\n\r\n".encode())
        assert connection.recv(64) == b"HTTP/1.1 100 (Continue)\r\n\r\n"
        connection.sendall(body)
        assert read_reply(connection).status == 200


def test_a_body_far_over_the_limit_is_answered_without_reading_it(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "DRAIN_BYTES", MIB)
    server = start_server(max_request_length=1)
    announced = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**15}\r\n\r\n"
    assert server.exchange(announced.encode()).status == 413
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    # No end of the body: the reply comes before it.
    assert server.exchange(head + piece * 33).status == 413


@pytest.mark.parametrize("path", [STREAM, GENERATE])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("unread", [b"", b"\r\n", b"x" * 50_000])
def test_a_client_that_vanishes_ends_its_request(
    server: Server, path: str, how: str, unread: bytes
) -> None:
    """While the server waits for a token, and nothing is being written. What the client sent
    behind its request must not hide that it is gone."""
    gate = server.thread.call(server.backend.gate)
    server.backend.enqueue(72, gate, 105, FinishReason.LENGTH)
    connection = server.connect()
    raw = request_bytes("POST", path, {"id": "gone", "text_input": "x"})
    connection.sendall(raw.replace(b"Connection: close\r\n", b"") + unread)
    eventually(lambda: server.service.status().running == 1)
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how != "half":
        connection.close()
    eventually(lambda: server.backend.cancelled == ["gone"])
    connection.close()
    assert not server.service.is_running("gone")
    assert server.generate({"text_input": "next"}).json()["text_output"] == "next"


def test_a_client_that_vanishes_while_the_server_writes(server: Server) -> None:
    with server.connect() as connection:
        many = {"id": "gone", "text_input": "x" * 500, "parameters": {"max_new_tokens": 500}}
        server.backend.enqueue(*([88] * 100_000), FinishReason.LENGTH)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request_bytes("POST", STREAM, many))
        assert connection.recv(100)
    eventually(lambda: server.backend.cancelled == ["gone"])


@pytest.mark.parametrize("how", ["close", "half"])
def test_what_stood_behind_a_vanished_clients_request_never_starts(
    server: Server, how: str
) -> None:
    gate = server.thread.call(server.backend.gate)
    server.backend.enqueue(72, gate, 105, FinishReason.LENGTH)
    raw = request_bytes("POST", STREAM, {"id": "gone", "text_input": "x"})
    behind = request_bytes("POST", STREAM, {"id": "behind", "text_input": "x"})
    with server.connect() as connection:
        connection.sendall(raw.replace(b"Connection: close\r\n", b"") + behind)
        eventually(lambda: server.service.is_running("gone"))
        if how == "half":
            connection.shutdown(socket.SHUT_WR)
            eventually(lambda: server.backend.cancelled == ["gone"])
    eventually(lambda: server.backend.cancelled == ["gone"])
    assert server.generate({"id": "next", "text_input": "x"}).status == 200
    assert [r.request_id for r in server.backend.requests] == ["gone", "next"]
    metrics = server.send("GET", "/metrics").body.decode()
    assert 'request_failed_total{model_name="echo"} 0.0' in metrics


def test_a_client_that_vanishes_inside_its_body(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(request_bytes("POST", STREAM, {"text_input": "x"})[:-3])
    assert server.generate({"text_input": "next"}).status == 200
    assert len(server.backend.requests) == 1


def test_a_slow_reader_gets_everything_and_holds_back_only_itself(server: Server) -> None:
    server.backend.enqueue(*([88] * 50_000), FinishReason.LENGTH)
    slow = server.connect()
    # Less than the stream, so that the server has to wait; enough to read it fast afterwards.
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    slow.sendall(request_bytes("POST", STREAM, {"id": "slow", "text_input": "x"}))
    eventually(lambda: server.service.is_running("slow"))
    assert server.generate({"text_input": "fast"}).json()["text_output"] == "fast"
    assert server.service.is_running("slow")
    with slow:
        reply = read_reply(slow)
    assert len(reply.events()) == 50_000


def test_a_client_that_never_reads_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(event_writer, "WRITE_TIMEOUT", 0.05)
    server.backend.enqueue(*([88] * 200_000), FinishReason.LENGTH)
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request_bytes("POST", STREAM, {"id": "stuck", "text_input": "x"}))
        eventually(lambda: server.backend.cancelled == ["stuck"])
        eventually(lambda: "POST" in caplog.text)
    assert [r.levelname for r in caplog.records if r.levelname != "INFO"] == ["WARNING"]
    assert "stuck: the client read nothing for 0 s" in caplog.text


def test_a_failing_stream_ends_as_it_should(server: Server) -> None:
    """The connection stays usable: the last chunk of the coding is there."""
    server.backend.enqueue(72, BackendFailed("It broke."))
    with server.connect() as connection:
        raw = request_bytes("POST", STREAM, {"id": "a", "text_input": "x"})
        connection.sendall(raw.replace(b"Connection: close\r\n", b""))
        first, last = read_reply(connection).events()
        assert first["text_output"] == "H"
        assert last == {
            "id": "a",
            "error": "Failed to get engine response. It broke.",
            "error_type": "Incomplete Generation",
        }
        connection.sendall(request_bytes("POST", GENERATE, {"text_input": "next"}))
        assert read_reply(connection).json()["text_output"] == "next"


@pytest.mark.parametrize("path", [STREAM, GENERATE])
def test_a_fault_of_the_server_says_nothing_of_its_inside(
    server: Server, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: object) -> None:
        raise ValueError("secret")

    monkeypatch.setattr(server.backend, "submit", broken)
    reply = server.send("POST", path, {"text_input": "x"})
    assert (reply.status, reply.json()) == (
        500,
        {"error": "Server internal error", "error_type": "Internal Server Error"},
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"POST\r\n\r\n",
        b"POST /v2 HTTP/9\r\n\r\n",
        b"POST " + GENERATE.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST " + GENERATE.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2, 3\r\n\r\nxxx",
        b"POST " + GENERATE.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_ends_the_connection_and_nothing_else(server: Server, raw: bytes) -> None:
    with server.connect() as connection:
        try:
            connection.sendall(raw)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert server.generate({"text_input": "next"}).status == 200


def test_huge_bodies_are_answered_and_others_meanwhile(server: Server) -> None:
    """Numbers, items and values by the million, within the limit of bytes."""
    numbers = b"1," * 4_000_000 + b"1"
    items = b'{"text":"x"},' * 200_000 + b'{"text":"x"}'
    bodies = [
        b'{"text_input":"x","parameters":{"decodeTime":[%b]}}' % numbers,
        b'{"text_input":[%b]}' % items,
        b'{"text_input":"x","other":[%b]}' % (b"[]," * 2_000_000 + b"1"),
    ]
    with server.connect() as heavy, server.connect() as light:
        for body in bodies:
            raw = request_bytes("POST", GENERATE, body).replace(b"Connection: close\r\n", b"")
            sender = threading.Thread(target=heavy.sendall, args=(raw,))
            sender.start()
            answered = 0
            while sender.is_alive() or answered < 3:
                raw = request_bytes("POST", GENERATE, {"text_input": "light"})
                light.sendall(raw.replace(b"Connection: close\r\n", b""))
                assert read_reply(light).json()["text_output"] == "light"
                answered += 1
            sender.join()
            assert read_reply(heavy).status in (200, 422, 424)


def test_an_answer_cancelled_by_a_backend_still_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(request: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(server.backend, "submit", cancelled)
    reply = server.generate({"text_input": "x"})
    assert (reply.status, reply.json()["error_type"]) == (500, "Incomplete Generation")
