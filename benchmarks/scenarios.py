"""Every speed the README states, measured in one run and printed beside its target.

    python benchmarks/scenarios.py                      # all, about ten minutes with the demo model
    python benchmarks/scenarios.py --only front memory scheduler
    python benchmarks/scenarios.py --set cpu.weights=int8 --json figures.json

Ratios, not absolute speeds: both sides of each are measured on the same machine in the same run,
taking turns. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import front_scenarios as front
import model_scenarios as model
from figures import Figure, machine, markdown
from load_client import Target
from server_process import peak_bytes, serve

from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.tokenizer import open_tokenizer

START = "start"
MODEL_SCENARIOS = ("batching", "endpoint", "interference", "prefix")
FRONT_SCENARIOS = ("front", "memory", "scheduler")


def main(arguments: list[str] | None = None) -> int:
    """Prints one line a figure as it comes, then the table; 2 if a scenario could not be run."""
    options = _parser().parse_args(arguments)
    _allow_many_sockets()
    figures: list[Figure] = []
    status = 0
    for name, run in _chosen(options):
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            found = run()
        except (RuntimeError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 2
            continue
        for figure in found:
            print(f"  {' | '.join(figure.row())} {json.dumps(figure.detail)}", file=sys.stderr)
        figures += found
    print(markdown(figures))
    if options.json:
        document = {"machine": machine(), "figures": [_plain(figure) for figure in figures]}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return status


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[Figure]]]]:
    chosen = options.only or (START, *MODEL_SCENARIOS, *FRONT_SCENARIOS)
    rounds = options.rounds
    if START in chosen:
        yield START, lambda: model.second_start(options.model, options.set, rounds)
    on_model = [name for name in MODEL_SCENARIOS if name in chosen]
    if on_model:
        yield ", ".join(on_model), lambda: _model_figures(options, on_model)
    if "front" in chosen:
        yield "front", lambda: _on_echo((), lambda s: front.events_per_second(s, rounds))
    if "memory" in chosen:
        yield "memory", lambda: _on_echo(front.MANY_STREAMS_OVERRIDES, front.memory_per_stream)
    if "scheduler" in chosen:
        yield "scheduler", lambda: front.scheduler_step(rounds)


def _on_echo(overrides: tuple[str, ...], run: Callable[..., object]) -> list[Figure]:
    with serve("echo", overrides) as server:
        return asyncio.run(run(server))  # type: ignore[arg-type]  # a coroutine of list[Figure]


def _model_figures(options: argparse.Namespace, chosen: list[str]) -> list[Figure]:
    """One server for all, so that the figures are of one start."""
    deployment = load_deployment(options.model, dict(pair.split("=", 1) for pair in options.set))
    figures: list[Figure] = []
    with serve(options.model, options.set) as server:
        encode = open_tokenizer(deployment).encode
        target = Target.of(server.url, server.model)
        if "batching" in chosen:
            figures += asyncio.run(model.batching(target, options.rounds))
        if "prefix" in chosen:
            figures += asyncio.run(model.repeated_prefix(target, encode, options.rounds))
        if "interference" in chosen:
            figures += asyncio.run(
                model.interference(target, encode, options.rounds, options.pause)
            )
        peak = peak_bytes(server.pid) / 2**30
        figures.append(Figure("peak memory of the server", peak, "GiB", 2.5, False))
        if "endpoint" in chosen:
            with model.engine_process(options.model, options.set) as order:
                cost = model.endpoint_cost(target, encode, order, options.rounds)
                figures += asyncio.run(cost)
    return figures


def _plain(figure: Figure) -> dict[str, object]:
    return {
        "name": figure.name,
        "value": round(figure.value, 4),
        "unit": figure.unit,
        "target": figure.target,
        "at_least": figure.at_least,
        "met": figure.met,
        "detail": figure.detail,
    }


def _allow_many_sockets() -> None:
    """A thousand streams need more descriptors than many shells allow; servers inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = (START, *MODEL_SCENARIOS, *FRONT_SCENARIOS)
    parser.add_argument("--only", nargs="+", choices=names, help="these alone")
    parser.add_argument("--model", default="smollm2-135m", help="deployment of the first five")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for that deployment")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of each measurement")
    pause = "seconds between the long prompts of `interference`"
    parser.add_argument("--pause", type=float, default=4.0, help=pause)
    parser.add_argument("--json", metavar="FILE", help="write figures and machine there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
