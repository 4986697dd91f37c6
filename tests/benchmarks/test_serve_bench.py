"""The load client reads what the server sends, however the network cuts it, and counts honestly."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of benchmarks/, which are scripts and not a package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def event(number: int, finish: str | None = None, text: str = "x") -> bytes:
    reason = {"finish_reason": finish} if finish else {}
    details = {**reason, "generated_tokens": number, "batch_size": 1, "queue_wait_time": 3}
    document = {"id": "a", "text_output": text, "details": details, "prefill_time": None}
    return b"data:" + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def framed(*events: bytes, close: bool = False) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    head += b"Connection: close\r\n" if close else b""
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


STREAM = framed(event(1), event(2, text="\\n\\n"), event(3, "length"))


def outcomes_of(bench: Any, replies: list[list[bytes]], streams: int = 1) -> list[Any]:
    """Serves the replies, each in its pieces, one a request; returns what the client saw."""
    client = bench("load_client")
    waiting: Iterator[list[bytes]] = iter(replies)
    requests: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                requests.append(head + await reader.readexactly(length))
                for piece in next(waiting):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if b"Connection: close" in piece or piece == b"":
                    break
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()

    async def run() -> list[Any]:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = client.Target.of(f"http://127.0.0.1:{port}", "m")
        sent = [target.request("a b", 3, seed=number) for number in range(len(replies))]
        outcomes, seconds = await client.closed_loop(target, sent, streams)
        assert seconds > 0
        server.close()
        assert sorted(requests) == sorted(sent)
        return list(outcomes)

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_any_cut_of_the_bytes_reads_the_same(bench: Any) -> None:
    replies = [[STREAM[:cut], STREAM[cut:]] for cut in range(1, len(STREAM))]
    replies.append([STREAM[i : i + 1] for i in range(len(STREAM))])
    for outcome in outcomes_of(bench, replies, streams=4):
        assert (outcome.error, outcome.tokens, outcome.finish_reason) == ("", 3, "length")
        assert len(outcome.arrivals) == 3
        assert outcome.sent <= outcome.arrivals[0] <= outcome.arrivals[-1] <= outcome.ended


def test_failures_are_named(bench: Any) -> None:
    refused = b'HTTP/1.1 422 Unprocessable\r\nContent-Length: 13\r\n\r\n{"error":"e"}'
    broken = b'data:{"id":"a","error":"engine died","error_type":"x"}\n\n'
    replies = [
        [refused],
        [refused[:20], refused[20:-3], refused[-3:]],
        [framed(event(1), broken)],
        [framed(event(1))],
        [framed(b"data:nonsense\n\n")],
        [framed(event(1), close=True)[:-5], b""],
    ]
    errors = [outcome.error for outcome in outcomes_of(bench, replies)]
    assert errors[:2] == ['HTTP/1.1 422 Unprocessable: {"error":"e"}'] * 2
    assert errors[2:] == [
        "error event: engine died",
        "the stream ended without a finish_reason",
        "the last event is not JSON: b'nonsense'",
        "the connection closed before the stream ended",
    ]


def test_a_connection_that_closes_is_replaced(bench: Any) -> None:
    reply = framed(event(1, "length"), close=True)
    outcomes = outcomes_of(bench, [[reply]] * 3)
    assert [outcome.error for outcome in outcomes] == [""] * 3


def test_nobody_listens(bench: Any) -> None:
    client = bench("load_client")
    target = client.Target("127.0.0.1", 1, "m")
    outcomes, _ = asyncio.run(client.closed_loop(target, [b"x"] * 3, 2))
    assert all("no connection" in outcome.error for outcome in outcomes)
    assert len(outcomes) == 3


def test_level_arithmetic(bench: Any) -> None:
    report, client = bench("report"), bench("load_client")
    good = client.Outcome(10.0, [10.1, 10.2, 10.4], 10.4, 3, "length")
    short = client.Outcome(10.0, [10.1], 10.4, 3, "length")
    failed = client.Outcome(10.0, [], 10.0, 0, "", "HTTP/1.1 503")
    one = report.level(2, [good, short, failed], 0.5, 3 * 2**20)
    assert (one.requests, one.failures, one.tokens, one.tokens_per_second) == (3, 2, 3, 6.0)
    assert one.errors == {"1 events for 3 tokens": 1, "HTTP/1.1 503": 1}
    assert (one.ttft_p50_ms, one.itl_p50_ms, one.itl_p99_ms) == pytest.approx((100, 100, 200))
    assert one.peak_memory_mib == 3.0
    fast = report.level(2, [good], 0.00853, None)
    assert fast.tokens_per_second == pytest.approx(fast.tokens / fast.seconds, rel=1e-3)
    none = report.level(1, [failed], 0.5, None)
    assert none.ttft_p50_ms is None
    assert "-" in report.table([none])


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 2), (51, 3), (75, 3), (99, 4)])
def test_percentile_is_a_measured_value(bench: Any, percent: float, expected: float) -> None:
    assert bench("report").percentile([4, 1, 3, 2], percent) == expected


def test_prompts(bench: Any) -> None:
    prompts = bench("prompts")
    assert len(prompts.of_words(100, 1).split()) == 100
    assert prompts.of_words(100, 1) == prompts.of_words(100, 1) != prompts.of_words(100, 2)
    for count in (1, 5, 1000):
        assert len(prompts.of_tokens(str.encode, count, 3)) == count
