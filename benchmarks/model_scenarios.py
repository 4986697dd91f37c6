"""Scenarios over a real model: start, batching, the endpoint's cost, interference, prefix cache."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import prompts
from figures import Figure
from load_client import Outcome, Target, closed_loop, connect, standing_back
from report import level, percentile, problem
from server_process import serve

Encode = Callable[[str], Sequence[int]]

WORDS, NEW_TOKENS = 100, 64
# Prompts of no two requests begin alike.
_seeds = itertools.count(1)


def _fresh(count: int) -> list[str]:
    return [prompts.of_words(WORDS, next(_seeds)) for _ in range(count)]


async def _rate(target: Target, texts: Sequence[str], streams: int) -> float:
    """Tokens a second; raises RuntimeError if a request failed."""
    requests = [target.request(text, NEW_TOKENS) for text in texts]
    with standing_back():
        outcomes, seconds = await closed_loop(target, requests, streams)
    return level(streams, checked(outcomes), seconds, None).tokens_per_second


def checked(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """The outcomes, if all are good; a scenario with failures measures nothing."""
    failed = [problem(outcome) for outcome in outcomes if problem(outcome)]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
    return outcomes


def second_start(deployment: str, overrides: Sequence[str], rounds: int) -> list[Figure]:
    """Seconds of a start that finds its compiled graphs on disk: the first one has put them there.

    The engine's parts are from its own log line; a backend that does not say them has none.
    """
    with serve(deployment, overrides):
        pass
    ready: list[float] = []
    parts: dict[str, list[float]] = {}
    for _ in range(rounds):
        with serve(deployment, overrides) as server:
            ready.append(round(server.seconds, 2))
            for part, seconds in load_parts(server.log).items():
                parts.setdefault(part, []).append(seconds)
    detail: dict[str, object] = {"until ready s": ready}
    figures = [Figure("second start: until ready", median(ready), "s", None, False, detail)]
    for part, found in parts.items():
        target = None if part == "imports" else 6.0
        name = f"second start: {part}"
        figures.append(Figure(name, median(found), "s", target, False, {f"{part} s": found}))
    return figures


def load_parts(log: str) -> dict[str, float]:
    """Seconds by part, of the line `loaded: imports 5.10 s, weights and graph 2.00 s`."""
    line = re.search(r"loaded: (.*)$", log, re.MULTILINE)
    parts = re.findall(r"([a-z][a-z ]*) ([\d.]+) s", line[1] if line else "")
    return {name: float(seconds) for name, seconds in parts}


async def batching(target: Target, rounds: int) -> list[Figure]:
    """Tokens/s at 8 and 32 streams to one stream; the levels take turns."""
    rates: dict[int, list[float]] = {1: [], 8: [], 32: []}
    await _rate(target, _fresh(32), 32)  # warm-up: every buffer has grown
    for _ in range(rounds):
        for streams, found in rates.items():
            found.append(await _rate(target, _fresh(max(3, 2 * streams)), streams))
    middle = {streams: median(found) for streams, found in rates.items()}
    detail: dict[str, object] = {f"tokens/s at {n}": found for n, found in rates.items()}
    work = f"{WORDS}-word prompts, {NEW_TOKENS} tokens"
    return [
        Figure(f"8 streams to 1 ({work})", middle[8] / middle[1], "x", 4, True, detail),
        Figure(f"32 streams to 1 ({work})", middle[32] / middle[1], "x", 8, True, detail),
    ]


@contextmanager
def engine_process(deployment: str, overrides: Sequence[str]) -> Iterator[Callable[..., Any]]:
    """A second, loaded engine without a server; the yielded call gives it an order."""
    driver = Path(__file__).with_name("engine_driver.py")
    command = [sys.executable, str(driver), deployment, *overrides]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def answer() -> Any:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")
            return json.loads(line)

        def order(**document: object) -> Any:
            if process.stdin is not None:
                process.stdin.write(json.dumps(document) + "\n")
                process.stdin.flush()
            return answer()

        try:
            answer()
            yield order
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(60)


async def endpoint_cost(
    target: Target, encode: Encode, order: Callable[..., Any], rounds: int, streams: int = 32
) -> list[Figure]:
    """The endpoint's tokens/s to the bare engine's, on the same prompts, taking turns."""
    served: list[float] = []
    bare: list[float] = []
    for measured in range(rounds + 1):
        texts = _fresh(2 * streams)
        work = {"streams": streams, "max_new_tokens": NEW_TOKENS}
        rate = await _rate(target, texts, streams)
        found = await asyncio.to_thread(order, prompts=[list(encode(t)) for t in texts], **work)
        if measured:  # the first round warms both up
            served.append(rate)
            bare.append(round(found["tokens"] / found["seconds"], 1))
    ratio = median(served) / median(bare) * 100
    detail: dict[str, object] = {"endpoint tokens/s": served, "engine tokens/s": bare}
    name = f"endpoint to engine in process, {streams} streams"
    return [Figure(name, ratio, "%", 95, True, detail)]


async def interference(
    target: Target,
    encode: Encode,
    rounds: int,
    pause: float = 4.0,
    streams: int = 8,
    tokens: int = 1500,
) -> list[Figure]:
    """Running streams' inter-token gaps while a long prompt is prefilled, to their usual ones.

    The long prompts are `pause` seconds apart.
    """
    ended: list[Outcome] = []
    running = True

    async def background() -> None:
        connection = await connect(target)
        while running:
            text = prompts.of_words(10, next(_seeds))
            ended.append(await connection.ask(target.request(text, 256)))
            if not connection.reusable:
                connection = await connect(target)
        connection.close()

    tasks = [asyncio.create_task(background()) for _ in range(streams)]
    windows: list[tuple[float, float]] = []
    try:
        for _ in range(3 * rounds):
            await asyncio.sleep(pause)
            prompt = prompts.of_tokens(encode, tokens, next(_seeds))
            (long,), _ = await closed_loop(target, [target.request(prompt, 1)], 1)
            checked([long])
            windows.append((long.sent, long.arrivals[0]))
        await asyncio.sleep(pause)
    finally:
        running = False
        await asyncio.gather(*tasks)
    usual, disturbed = _gaps(checked(ended), windows)
    middle, worst = percentile(usual, 50), percentile(disturbed, 99)
    if not middle or not worst:
        raise RuntimeError("no gaps were measured")
    detail: dict[str, object] = {
        "usual median ms": middle,
        "usual p99 ms": percentile(usual, 99),
        "disturbed median ms": percentile(disturbed, 50),
        "disturbed p99 ms": worst,
        "disturbed gaps": len(disturbed),
        "prefill ms": [round((end - begin) * 1000) for begin, end in windows],
    }
    name = f"p99 gap of {streams} streams during a {tokens}-token prefill to their median"
    return [Figure(name, worst / middle, "x", 3, False, detail)]


def _gaps(
    outcomes: Sequence[Outcome], windows: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Milliseconds (outside, inside) of the windows; a gap that touches one is inside."""
    usual: list[float] = []
    disturbed: list[float] = []
    for outcome in outcomes:
        for begin, end in zip(outcome.arrivals, outcome.arrivals[1:], strict=False):
            inside = any(begin < last and end > first for first, last in windows)
            (disturbed if inside else usual).append((end - begin) * 1000)
    return usual, disturbed


async def repeated_prefix(
    target: Target, encode: Encode, rounds: int, tokens: int = 1000
) -> list[Figure]:
    """Time to first token of a prompt whose beginning was seen before, to that of a new one."""
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(3 * rounds):
        prefix = prompts.of_tokens(encode, tokens, next(_seeds))
        for found in (cold, warm):
            text = f"{prefix} {prompts.of_words(10, next(_seeds))}"
            (outcome,), _ = await closed_loop(target, [target.request(text, 1)], 1)
            found.append(checked([outcome])[0].ttft * 1000)
    detail: dict[str, object] = {
        "cold ms": [round(ms, 1) for ms in cold],
        "warm ms": [round(ms, 1) for ms in warm],
    }
    ratio = median(warm) / median(cold) * 100
    return [
        Figure(f"TTFT with a repeated {tokens}-token prefix to cold", ratio, "%", 15, False, detail)
    ]
