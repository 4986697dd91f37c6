"""Scenarios without a model: the front end over `echo`, and the scheduler's own work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import prompts
from figures import Figure
from load_client import Connection, Target, closed_loop, connect
from model_scenarios import checked
from server_process import Server, cpu_seconds, process_tree, resident_bytes

from mindstream.backends.engine.scheduler import Scheduler
from mindstream.plugin.backend import Limits
from mindstream.plugin.request import GenerationRequest
from mindstream.plugin.serving_config import ServingConfig

# A thousand streams that all run, a token every fifth of a second.
MANY_STREAMS_OVERRIDES = (
    "max_batch_size=1024",
    "max_batched_tokens=8192",
    "echo.num_blocks=65536",
    "echo.delay_ms=200",
)


async def events_per_second(server: Server, rounds: int, streams: int = 32) -> list[Figure]:
    """Events a second of one core's time: the event-loop process runs on one thread.

    Processor time, not the clock: engine and client share the machine's other core with whatever
    else runs. The rate by the clock is in the detail.
    """
    target = Target.of(server.url, server.model)
    prompt = prompts.of_tokens(str.encode, 500, 0)
    requests = [target.request(prompt, 512) for _ in range(3 * streams)]
    await closed_loop(target, requests[:streams], streams)
    rates, by_clock = [], []
    for _ in range(2 * rounds):
        before = cpu_seconds(server.pid)
        outcomes, seconds = await closed_loop(target, requests, streams)
        events = sum(len(outcome.arrivals) for outcome in checked(outcomes))
        rates.append(round(events / (cpu_seconds(server.pid) - before)))
        by_clock.append(round(events / seconds))
    detail: dict[str, object] = {"events/s of a core": rates, "events/s by the clock": by_clock}
    name = f"front end alone, {streams} streams of echo"
    return [Figure(name, median(rates), "events/s", 20_000, True, detail)]


async def memory_per_stream(server: Server, streams: int = 1000) -> list[Figure]:
    """Growth of the event-loop process with `streams` open, divided by their number."""
    target = Target.of(server.url, server.model)
    request = target.request(prompts.of_tokens(str.encode, 300, 0), 512)
    await closed_loop(target, [target.request("warm up", 4)] * 8, 8)
    before = {pid: resident_bytes(pid, tree=False) for pid in process_tree(server.pid)}
    connections = [await connect(target) for _ in range(streams)]
    tasks = [asyncio.create_task(connection.ask(request)) for connection in connections]
    await _all_streaming(connections, tasks)
    growth = {
        pid: (resident_bytes(pid, tree=False) - size) / streams / 1000
        for pid, size in before.items()
    }
    for connection in connections:
        connection.close()
    await asyncio.gather(*tasks)
    front = growth.pop(server.pid)
    detail: dict[str, object] = {"engine process KB a stream": round(sum(growth.values()), 1)}
    return [Figure(f"memory of an open stream, {streams} open", front, "KB", 60, False, detail)]


async def _all_streaming(
    connections: Sequence[Connection], tasks: Sequence[asyncio.Task[object]], events: int = 3
) -> None:
    """Waits until every stream has had some events; raises RuntimeError if one ends before."""
    deadline = time.monotonic() + 120
    while any(len(connection.outcome.arrivals) < events for connection in connections):
        ended = sum(task.done() for task in tasks)
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"{ended} of {len(tasks)} streams ended before all had begun")
        await asyncio.sleep(0.1)


def scheduler_step(rounds: int, sequences: int = 256) -> list[Figure]:
    """Milliseconds of one step's `schedule` and `update` with that many sequences decoding."""
    block_size, context = 16, 512
    blocks = sequences * (context // block_size + 1)
    limits = Limits(32_000, context, sequences, block_size, blocks)
    serving = ServingConfig(max_batch_size=sequences, max_batched_tokens=8192)
    took: list[float] = []
    for _ in range(rounds):
        scheduler = Scheduler(limits, serving)
        rng = np.random.default_rng(0)
        for key in range(sequences):
            ids = tuple(int(i) for i in rng.integers(0, 32_000, 100))
            scheduler.add(key, GenerationRequest(str(key), ids, context - 100), 0.0)
        for number in range(300):
            began = time.perf_counter()
            step = scheduler.schedule(float(number))
            if step is None:
                raise RuntimeError("the scheduler has nothing to do")
            scheduler.update(step, [7] * len(step.sampling), float(number))
            if len(step.decodes) == sequences:
                took.append((time.perf_counter() - began) * 1000)
    detail: dict[str, object] = {
        "steps": len(took),
        "p99 ms": round(sorted(took)[-len(took) // 100], 3),
    }
    name = f"scheduler bookkeeping, {sequences} running"
    return [Figure(name, median(took), "ms a step", 1, False, detail)]
