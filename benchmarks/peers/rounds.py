"""The measuring: every round runs each contender once a row, on the same prompts, in turns.

A round is refused if a side computed other counts of tokens than the others: an early end of text
or a prompt found in a cache would be no comparison.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import prompts as words
from contenders import Contender, Prompt, Result
from server_process import cpu_seconds, process_tree

NEW_TOKENS = 64
WORDS = 100
DECODE_ROW = "decoding alone, tokens/s, 1 stream"
BANDWIDTH = "read bandwidth, bytes/s"
IDLE = "busy while all wait, share of the cores"
SPINNING = "of which the contenders, share of the cores"
PROMPT_TOKENS = "prompt tokens, 1 stream"
_LONG_WORDS = 1450
_BANDWIDTH_SCRIPT = """
import kernel_bench
kernel_bench.set_threads(0)
print(kernel_bench.read_bandwidth())
"""

Encode = Callable[[str], list[int]]
Values = dict[str, dict[str, list[float]]]


class Rounds:
    """`values`: {contender: {row: [value a round]}}; `machine`: the same of the machine."""

    def __init__(self, contenders: Sequence[Contender], encode: Encode) -> None:
        self.values: Values = {contender.name: {} for contender in contenders}
        self.machine: dict[str, list[float]] = {}
        self._contenders = contenders
        self._encode = encode
        self._seeds = itertools.count(1)
        self._turn = itertools.count()

    def run(self, rounds: int, streams: Sequence[int], *, long: bool) -> None:
        """Warms everybody up at every width, then measures. Raises RuntimeError."""
        for width in sorted({1, *streams}):
            self._batch(width, 20, 8)
        for number in range(1, rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            self._note_machine()
            for width in streams:
                for name, result in self._batch(width, WORDS, NEW_TOKENS).items():
                    self._note(name, f"tokens/s, {width} stream{'s' * (width > 1)}", result.rate)
                    if width == 1:
                        rate = (NEW_TOKENS - 1) / result.decode_seconds
                        self._note(name, DECODE_ROW, rate)
                        self._note(name, PROMPT_TOKENS, result.prompt_tokens)
            for name, result in self._batch(1, WORDS, 1).items():
                self._note(name, f"TTFT ms, {WORDS} words", result.ttft * 1e3)
            if long:
                for name, result in self._batch(1, _LONG_WORDS, 1).items():
                    self._note(name, "TTFT ms, 1,500 tokens", result.ttft * 1e3)

    def _note(self, name: str, row: str, value: float) -> None:
        self.values[name].setdefault(row, []).append(value)

    def _note_machine(self) -> None:
        """With everybody loaded and idle."""
        settle()
        busy, own = busy_shares(2.0)
        self.machine.setdefault(IDLE, []).append(busy)
        self.machine.setdefault(SPINNING, []).append(own)
        self.machine.setdefault(BANDWIDTH, []).append(read_bandwidth())

    def _batch(self, count: int, size: int, new: int) -> dict[str, Result]:
        """Prompts that nobody has seen, to each contender; who is first changes with every call."""
        texts = [words.of_words(size, next(self._seeds)) for _ in range(count)]
        batch = [Prompt(text, self._encode(text)) for text in texts]
        expected = (sum(len(prompt.ids) for prompt in batch), count * new)
        first = next(self._turn) % len(self._contenders)
        results = {}
        for contender in [*self._contenders[first:], *self._contenders[:first]]:
            settle()
            result = results[contender.name] = contender.run(batch, new)
            if (result.prompt_tokens, result.tokens) != expected:
                raise RuntimeError(
                    f"{contender.name} computed {result.prompt_tokens} prompt tokens and "
                    f"{result.tokens} new ones; expected {expected[0]} and {expected[1]}"
                )
        return results


def read_bandwidth() -> float:
    """Bytes a second, as kernel_bench.py measures it; in a process whose threads end with it."""
    folder = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", _BANDWIDTH_SCRIPT]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def settle() -> None:
    """Waits until no contender computes any more, 10 s at most.

    vLLM's worker spins for a second after its last step, on a core that the next side needs.
    """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        before = _own_seconds()
        time.sleep(0.3)
        if _own_seconds() - before <= 0.02:
            return


def busy_shares(seconds: float) -> tuple[float, float]:
    """What runs during the next `seconds`, as shares of all cores: all programs, our children."""
    before, own_before = _processor_times(), _own_seconds()
    time.sleep(seconds)
    spent = [now - then for now, then in zip(_processor_times(), before, strict=True)]
    own = (_own_seconds() - own_before) / seconds / (os.cpu_count() or 1)
    return 1 - sum(spent[3:5]) / sum(spent), own


def _processor_times() -> list[int]:
    """Of /proc/stat, all cores together: user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]


def _own_seconds() -> float:
    """Processor time of this process and its children; one that ended meanwhile counts nothing."""
    total = 0.0
    for pid in process_tree(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            total += cpu_seconds(pid)
    return total


def as_json(rounds: Rounds, about: dict[str, Any]) -> str:
    """Everything that was measured, and `about` what was compared."""
    return json.dumps(
        {"about": about, "values": rounds.values, "machine": rounds.machine}, indent=1
    )
