"""Closed-loop load on generate_stream: tokens/s, TTFT, inter-token times, failures, peak memory.

    python benchmarks/serve_bench.py --serve smollm2-135m --streams 1 8 32
    python benchmarks/serve_bench.py --url http://127.0.0.1:1025 --model smollm2-135m --pid 4242

`--serve` starts the server itself (a shipped name or a yaml) and measures its processes' memory;
`--url` aims at a running one, whose memory needs its `--pid`. Each stream sends its next request
when the last one ended. Every prompt is new, so that no prefix cache helps. The exit status is 1
if a request failed, 2 if the server did not start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import prompts
from load_client import Target, closed_loop
from report import Level, as_json, level, table
from server_process import Server, peak_bytes, serve


def main(arguments: list[str] | None = None) -> int:
    """Prints the table, and the JSON to `--json` or below it."""
    options = _parser().parse_args(arguments)
    try:
        with ExitStack() as stack:
            if options.serve:
                server = stack.enter_context(serve(options.serve, options.set))
            else:
                server = Server(options.url, options.model, options.pid)
            levels = asyncio.run(measure(server, options))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(levels))
    document = {
        "model": server.model,
        "prompt_words": options.prompt_words,
        "max_new_tokens": options.max_new_tokens,
        "levels": [as_json(one) for one in levels],
    }
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    else:
        print(json.dumps(document))
    return 1 if any(one.failures for one in levels) else 0


async def measure(server: Server, options: argparse.Namespace) -> list[Level]:
    """One level after the other, each behind a warm-up of one request a stream."""
    target = Target.of(server.url, server.model)
    levels = []
    for number, streams in enumerate(options.streams):
        count = options.requests or max(4, 2 * streams)
        first = 1_000_000 * (number + 1) + options.seed
        requests = [
            target.request(
                prompts.of_words(options.prompt_words, first + i), options.max_new_tokens
            )
            for i in range(streams + count)
        ]
        await closed_loop(target, requests[:streams], streams)
        outcomes, seconds = await closed_loop(target, requests[streams:], streams)
        peak = peak_bytes(server.pid) if server.pid else None
        levels.append(level(streams, outcomes, seconds, peak))
        for error, times in levels[-1].errors.items():
            print(f"{streams} streams: {times} x {error}", file=sys.stderr)
    return levels


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--serve", metavar="NAME|FILE", help="start this deployment")
    where.add_argument("--url", help="a running server, http://host:port")
    parser.add_argument("--model", default="smollm2-135m", help="model name at --url")
    parser.add_argument("--pid", type=int, default=0, help="process of --url, for its memory")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for --serve")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=0, help="of a level; default 2 a stream")
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="another one: other prompts")
    parser.add_argument("--json", metavar="FILE", help="write the JSON there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
