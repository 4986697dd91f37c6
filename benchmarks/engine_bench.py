"""What the engine itself costs a step, without a model, HTTP or a second process.

    python benchmarks/engine_bench.py            # about ten seconds
    python benchmarks/engine_bench.py --json FILE

`decode`: schedule and update with 256 running sequences. `chunks`: the same while prompts are cut
to a 512-token budget. `admission`: a request with a 1,000-token prefix that is in the cache joins
and leaves. `preemption`: a pool that is too small. `report`: encoding what 256 sequences got, which
is all that overlapping delivery with the device could save (for sampling: `engine_overlap.py`).
`echo`: tokens a second of the whole loop in process, greedy sampling included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import msgspec

from mindstream.backends.echo.step_model import EchoStepModel
from mindstream.backends.echo.vocabulary import vocabulary_of
from mindstream.backends.engine.loop import Engine
from mindstream.backends.engine.messages import Delta, Report, Submit
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.scheduler import Scheduler, Step
from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import Deployment, EchoConfig, ServingConfig
from mindstream.plugin.request import GenerationRequest

Times = Iterator[float]  # seconds, one a step


def request(key: int, prompt: int, output: int, shared: int = 0) -> GenerationRequest:
    """`prompt` ids, of which the first `shared` are the same in all."""
    ids = (*([7] * shared), *((key + i) % 32_000 for i in range(prompt - shared)))
    return GenerationRequest(str(key), ids, output)


def step_of(scheduler: Scheduler, now: float) -> tuple[Step, float]:
    """One step without a model, and the seconds it took."""
    began = time.perf_counter()
    step = scheduler.schedule(now)
    if step is None:
        raise RuntimeError("the scheduler has nothing to do")
    scheduler.update(step, [5] * len(step.sampling), now)
    return step, time.perf_counter() - began


def decode(steps: int) -> Times:
    """256 sequences of 100 tokens and more, all decoding."""
    scheduler = Scheduler(
        Limits(32_000, 4096, 256, 16, 40_000),
        ServingConfig(max_batch_size=256, max_batched_tokens=8192),
    )
    for key in range(256):
        scheduler.add(key, request(key, 100, 2000), 0.0)
    while steps:
        step, took = step_of(scheduler, 1.0)
        if len(step.decodes) == 256:
            steps -= 1
            yield took


def chunks(steps: int) -> Times:
    """200 sequences decode while new prompts of 1,500 tokens are cut to the budget."""
    scheduler = Scheduler(
        Limits(32_000, 8192, 256, 16, 80_000),
        ServingConfig(max_batch_size=256, max_batched_tokens=512, prefix_cache=False),
    )
    for key in range(200):
        scheduler.add(key, request(key, 10, 8000), 0.0)
    next_key = 1000
    while steps:
        if scheduler.stats().waiting == 0:
            scheduler.add(next_key, request(next_key, 1500, 1), 0.0)
            next_key += 1
        step, took = step_of(scheduler, 1.0)
        if len(step.decodes) == 200 and step.chunks:
            steps -= 1
            yield took


def admission(steps: int) -> Times:
    """A request with 1,000 shared tokens joins an idle engine, gets its one token and leaves."""
    scheduler = Scheduler(Limits(32_000, 4096, 64, 16, 1000), ServingConfig())
    for key in range(steps + 3):
        scheduler.add(key, request(key, 1016, 1, shared=1000), 0.0)
        took = 0.0
        while not scheduler.idle:
            took += step_of(scheduler, 1.0)[1]
        if key > 2:
            yield took


def preemption(steps: int) -> Times:
    """64 sequences in a pool for about 40."""
    scheduler = Scheduler(
        Limits(32_000, 2048, 64, 16, 1600), ServingConfig(max_batched_tokens=2048)
    )
    key = 0
    while steps:
        while scheduler.stats().waiting < 4:
            scheduler.add(key, request(key, 100, 1000), 0.0)
            key += 1
        yield step_of(scheduler, float(key))[1]
        steps -= 1


def report(steps: int) -> Times:
    """Encoding one report of 256 deltas."""
    encoder = msgspec.msgpack.Encoder()
    stats = Scheduler(Limits(10, 10, 1, 1, 1), ServingConfig()).stats()
    deltas = [Delta(key, 1234, 17, 250, False, 12.345, 0) for key in range(256)]
    for _ in range(steps):
        began = time.perf_counter()
        encoder.encode(Report(256, deltas, [], stats))
        yield time.perf_counter() - began


def echo_rate(streams: int, tokens: int = 400) -> float:
    """Tokens a second of the loop over the echo model, in process."""
    serving = ServingConfig(
        backend="echo",
        tokenizer="bytes",
        max_batch_size=streams,
        max_batched_tokens=4096,
        echo=EchoConfig(num_blocks=streams * (tokens // 8 + 1), block_size=16),
    )
    deployment = Deployment(Path("bench.yaml"), serving, {}, None)
    model = EchoStepModel(deployment)
    engine = Engine(model, model.load(), serving, Sampler(None))
    mark = vocabulary_of(deployment).size
    began = time.perf_counter()
    for key in range(streams):
        ids = [(key + i) % 256 for i in range(tokens)]
        ids[-1] += mark
        engine.apply(Submit(key, GenerationRequest(str(key), tuple(ids), tokens), 0.0))
    generated = 0
    while not engine.idle:
        engine.step()
        generated += len(engine.report().deltas)
    return generated / (time.perf_counter() - began)


CASES: dict[str, Callable[[int], Times]] = {
    "decode": decode,
    "chunks": chunks,
    "admission": admission,
    "preemption": preemption,
    "report": report,
}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(f"{'case':12} {'median ms':>10} {'p99 ms':>10}")
    for name, run in CASES.items():
        times = sorted(run(options.steps))
        results[name] = {
            "median_ms": median(times) * 1e3,
            "p99_ms": times[-len(times) // 100] * 1e3,
        }
        print(f"{name:12} {results[name]['median_ms']:10.3f} {results[name]['p99_ms']:10.3f}")
    for streams in (1, 32, 256):
        rate = echo_rate(streams)
        results[f"echo {streams}"] = {"tokens_per_second": rate}
        print(f"echo, {streams:3} streams: {rate:10.0f} tokens/s in process")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
