"""The served decode rate of one stream beside the bare graph called in a loop, taking turns.

    python benchmarks/bare_graph.py
    python benchmarks/bare_graph.py --set cpu.weights=f32 --rounds 10

Both decode the same prompt greedily to the same length. A rate is tokens a second between the first
token and the last. The bare side is the StepModel alone in a second process: `forward`, argmax,
next; no scheduler, sampler, link, text or HTTP. Each side is idle while the other one works.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter

import numpy as np
import prompts
from figures import Figure, markdown
from load_client import Target, closed_loop
from report import problem
from server_process import serve

from mindstream.backends.engine.step_model import Batch, StepModel
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.tokenizer import open_tokenizer


def decode_seconds(model: StepModel, block_size: int, ids: Sequence[int], new_tokens: int) -> float:
    """Seconds from the first to the last of `new_tokens` greedy tokens; the cache is only ours."""
    length = len(ids) + new_tokens
    table = np.arange(-(-length // block_size), dtype=np.int32)[None]
    fed, at = list(ids), 0
    began = 0.0
    for step in range(new_tokens):
        positions = np.arange(at, at + len(fed), dtype=np.int32)
        logits = model.forward(
            Batch(
                token_ids=np.asarray(fed, np.int32),
                positions=positions,
                slot_mapping=positions,
                q_seq_lens=np.asarray([len(fed)], np.int32),
                context_lens=np.asarray([at], np.int32),
                block_tables=table,
                logits_rows=np.asarray([len(fed) - 1], np.int32),
            )
        )
        at += len(fed)
        fed = [int(logits[0].argmax())]
        if step == 0:
            began = perf_counter()
    return perf_counter() - began


def bare_process(pipe: Connection, target: str, overrides: dict[str, str]) -> None:
    """Answers (ids, new_tokens) with seconds until None comes."""
    from mindstream.backends.mindspore.step_model import MindSporeStepModel

    model = MindSporeStepModel(load_deployment(target, overrides))
    limits = model.load()
    pipe.send(0.0)
    while (order := pipe.recv()) is not None:
        pipe.send(decode_seconds(model, limits.block_size, *order))
    model.close()


@contextmanager
def bare_graph(target: str, overrides: dict[str, str]) -> Iterator[Callable[..., float]]:
    """A loaded model in a process of its own; the call runs one decode and gives its seconds."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=bare_process, args=(theirs, target, overrides))
    process.start()
    theirs.close()  # so that a process that died is an EOFError and not a hang

    def run(*order: object) -> float:
        ours.send(order)
        return float(ours.recv())

    try:
        ours.recv()
        yield run
    except EOFError:
        raise RuntimeError(f"the process of the bare graph ended: {process.exitcode}") from None
    finally:
        with suppress(OSError):
            ours.send(None)
        process.join(60)
        process.terminate()


def served(target: Target, text: str, new_tokens: int) -> tuple[int, float]:
    """(tokens, seconds from first to last) of one request. Raises RuntimeError if it failed."""
    ((outcome,), _) = asyncio.run(closed_loop(target, [target.request(text, new_tokens)], 1))
    if problem(outcome):
        raise RuntimeError(problem(outcome))
    return outcome.tokens, outcome.arrivals[-1] - outcome.arrivals[0]


def alternate(
    target: Target, bare: Callable[..., float], encode: Callable[[str], Sequence[int]], new: int
) -> Iterator[tuple[float, float]]:
    """(served, bare) tokens a second without end, the bare graph decoding as many tokens."""
    for number in count():
        text = prompts.of_words(10, number)
        tokens, seconds = served(target, text, new)
        if tokens >= new // 2:  # the model ended early: too little to measure
            yield (tokens - 1) / seconds, (tokens - 1) / bare(list(encode(text)), tokens)


def main(arguments: list[str] | None = None) -> int:
    """Prints every round and the ratio; 2 if it could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a deployment of this backend")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for the deployment")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=200)
    options = parser.parse_args(arguments)
    overrides = dict(pair.split("=", 1) for pair in options.set)
    encode = open_tokenizer(load_deployment(options.model, overrides)).encode
    rates: list[tuple[float, float]] = []
    try:
        with serve(options.model, options.set) as server, bare_graph(options.model, overrides) as b:
            turns = alternate(Target.of(server.url, server.model), b, encode, options.new_tokens)
            next(turns)  # warms both up
            for ours, graphs in islice(turns, options.rounds):
                rates.append((ours, graphs))
                print(f"served {ours:6.1f}  bare {graphs:6.1f} tokens/s", file=sys.stderr)
    except (RuntimeError, OSError) as error:
        print(f"bare_graph: {error}", file=sys.stderr)
        return 2
    ratio = median(ours / graphs for ours, graphs in rates) * 100
    print(markdown([Figure("served decode rate to the bare graph's", ratio, "%", 90, True)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
