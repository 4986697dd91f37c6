"""A decode step of the dynamic-shape graph beside one graph a batch size, taking turns.

    python benchmarks/decode_shapes.py
    python benchmarks/decode_shapes.py --kernels fused attention --sequences 1 8 32

The static side compiles a graph for each batch size before it is timed and is then called with
exactly that size, which is the best that fixed buckets could do: no row is padding. Each side is a
process of its own and idle while the other one works. `ratio` above 1: buckets would be faster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from mindstream.backends.engine.step_model import Batch
from mindstream.plugin.model_config import load_deployment

CONTEXT = 100  # tokens already in the cache
STEPS = 10  # timed in a turn


def decode_batch(sequences: int, block_size: int) -> Batch:
    """Every sequence has CONTEXT tokens in blocks of its own and gets one more."""
    width = -(-(CONTEXT + 1) // block_size)
    tables = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
    ones, rows = np.ones(sequences, np.int32), np.arange(sequences, dtype=np.int32)
    slots = tables[:, CONTEXT // block_size] * block_size + CONTEXT % block_size
    return Batch(ones, ones * CONTEXT, slots, ones, ones * CONTEXT, tables, rows)


def make_static() -> None:
    """One graph a shape: no dynamic inputs, and a phase, the key of MindSpore's cache, for each."""
    from mindstream.backends.mindspore import builder, graph_cache
    from mindstream.backends.mindspore.graphs import Graphs

    graph_cache._used = True  # the folder on disk holds the dynamic graph

    network, run = builder._network, Graphs.run

    def without_dynamic_inputs(plan: Any) -> Any:
        from mindspore import nn  # by now MindSpore's environment is set

        nn.Cell.set_inputs = lambda *_: None
        model = network(plan)
        model.set_dynamic_inputs = lambda: None
        model.get_inputs = lambda: (None,) * 16
        return model

    def run_in_own_phase(self: Any, batch: Batch) -> Any:
        cell = self._step
        own = f"increment.{batch.token_ids.size}.{batch.block_tables.shape[1]}"
        if own not in cell.phase_cache:
            self._enter = lambda _phase: enter(cell, own)
            run(self, batch)
        # The short way into a graph, which the other side takes, knows this name alone.
        cell.phase_cache["increment"] = cell.phase_cache[own]
        self._enter = lambda _phase: enter(cell, "increment")
        return run(self, batch)

    def enter(cell: Any, phase: str) -> None:
        cell.model.add_flags_custom_mcore(False)
        cell.model.phase = cell.phase = phase

    builder._network = without_dynamic_inputs
    Graphs.run = run_in_own_phase  # type: ignore[method-assign]  # this process measures it alone


def side(pipe: Connection, target: str, kernels: str, static: bool) -> None:
    """Answers a number of sequences with milliseconds a step until None comes."""
    from mindstream.backends.mindspore.step_model import MindSporeStepModel

    if static:
        make_static()
    model = MindSporeStepModel(load_deployment(target, {"cpu.kernels": kernels}))
    limits = model.load()
    pipe.send(0.0)
    while (sequences := pipe.recv()) is not None:
        batch = decode_batch(sequences, limits.block_size)
        model.forward(batch)  # compiles where that has not happened yet
        times = []
        for _ in range(STEPS):
            began = perf_counter()
            model.forward(batch)
            times.append(perf_counter() - began)
        pipe.send(median(times) * 1e3)
    model.close()


@contextmanager
def running(target: str, kernels: str, static: bool) -> Iterator[Connection]:
    """The pipe of a loaded side."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=side, args=(theirs, target, kernels, static))
    process.start()
    theirs.close()  # so that a process that died is an EOFError and not a hang
    try:
        ours.recv()
        yield ours
        ours.send(None)
        process.join(60)
    finally:
        process.kill()


def measure(target: str, kernels: str, sizes: Sequence[int], rounds: int) -> Iterator[str]:
    """A table row for each batch size."""
    with running(target, kernels, False) as dynamic, running(target, kernels, True) as static:
        for size in sizes:
            pairs = []
            for _ in range(rounds):
                pair = []
                for pipe in (dynamic, static):
                    pipe.send(size)
                    pair.append(float(pipe.recv()))
                pairs.append(pair)
            ours, theirs = (median(p[i] for p in pairs) for i in (0, 1))
            ratio = median(p[0] / p[1] for p in pairs)
            yield f"| {kernels} | {size} | {ours:.1f} ms | {theirs:.1f} ms | {ratio:.2f} |"


def main(arguments: list[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kernels", nargs="+", default=["fused", "attention"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    print(
        "| kernels | sequences | dynamic shapes | a graph a size | ratio |\n|---|---|---|---|---|"
    )
    for kernels in options.kernels:
        for row in measure(options.model, kernels, options.sequences, options.rounds):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
