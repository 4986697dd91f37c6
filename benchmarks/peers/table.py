"""What the rounds gave, as Markdown: medians, ratios to the best peer, use of the bandwidth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rounds import BANDWIDTH, DECODE_ROW, IDLE, NEW_TOKENS, PROMPT_TOKENS, SPINNING, Values

from mindstream.backends.mindspore.cpu.fused_weights import WEIGHT_BYTES

BANDWIDTH_GOAL = 0.85
_CACHE_BYTES = 2  # bf16, which the fused kernels cache by default


def comparison(values: Values, own: Mapping[str, str]) -> str:
    """`own`: ours, by name; the last columns compare each of them with the best peer of the row."""
    rows = [row for row in next(iter(values.values())) if row != PROMPT_TOKENS]
    peers = [name for name in values if name not in own]
    heads = [*values, *(f"{name} / best peer" for name in own if peers)]
    lines = ["| | " + " | ".join(heads) + " |", "|" + "---|" * (1 + len(heads))]
    for row in rows:
        middle = {name: median(values[name][row]) for name in values}
        cells = [f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in middle.values()]
        if peers:
            best = (min if row.startswith("TTFT") else max)(middle[name] for name in peers)
            cells += [f"{middle[name] / best:.2f}x" for name in own]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bandwidth_use(
    values: Values, machine: Mapping[str, list[float]], own: Mapping[str, str], model_dir: Path
) -> str:
    """How much of the read bandwidth one stream of ours uses. `own`: name to kind of weights."""
    available = max(machine[BANDWIDTH])
    config = json.loads((model_dir / "config.json").read_text())
    lines = [
        f"Read bandwidth: {available / 1e9:.1f} GB/s (best of the rounds; "
        f"{', '.join(f'{found / 1e9:.1f}' for found in machine[BANDWIDTH])}). "
        f"While all sides waited the cores were {median(machine[IDLE]):.0%} busy, "
        f"{median(machine[SPINNING]):.1%} with the sides themselves."
    ]
    for name, kind in own.items():
        if DECODE_ROW not in values[name]:
            continue
        context = median(values[name][PROMPT_TOKENS]) + NEW_TOKENS / 2
        size = bytes_a_token(config, kind, context)
        decoding = median(values[name][DECODE_ROW]) * size
        whole = median(values[name]["tokens/s, 1 stream"]) * size
        lines.append(
            f"{name} at 1 stream: {size / 1e6:.0f} MB a token; decoding reads "
            f"{decoding / 1e9:.1f} GB/s, {decoding / available:.0%} of it (goal "
            f"{BANDWIDTH_GOAL:.0%}); with the prompt's time {whole / available:.0%}."
        )
    return "\n".join(lines)


def bytes_a_token(config: Mapping[str, Any], kind: str, context: float) -> float:
    """What one decoding step of one sequence must read: every matrix once, and its cache."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head
    layer = hidden * (2 * heads * head + 2 * kv + 3 * config["intermediate_size"])
    layers = config["num_hidden_layers"]
    # The embedding is one row unless it is the head as well; the head is read whole.
    matrices = layers * layer + config["vocab_size"] * hidden
    return matrices * WEIGHT_BYTES[kind] + 2 * layers * kv * _CACHE_BYTES * context
