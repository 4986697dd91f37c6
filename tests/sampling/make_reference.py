"""Writes reference.json beside it: what the processors of transformers make of some logits.

Run by hand, in an environment with torch and transformers==4.57.1; the tests read the file alone.
Everything is computed in float64. Logits are multiples of 1/1024 without ties, so that the file
holds them exactly and no cut depends on the order of equals.
"""

# torch and transformers are in no extra of this project: only this script, run by hand, needs them.
# mypy: disable-error-code="import-not-found"

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

CASES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"repetition_penalty": 20.0},
    {"temperature": 0.1},
    {"temperature": 2.0},
    {"top_k": 2},
    {"top_k": 5},
    {"top_k": 50},
    {"top_k": 1_000_000},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"typical_p": 0.1},
    {"typical_p": 0.5},
    {"typical_p": 0.95},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.8, "typical_p": 0.6},
    {
        "repetition_penalty": 1.1,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.99,
        "typical_p": 0.9,
    },
]


def logits(size: int, spread: float, seed: int) -> list[int]:
    """Distinct integers, normally distributed around -1024 with `spread` * 1024."""
    draws = np.random.default_rng(seed).normal(-1, spread, 4 * size)
    distinct = np.unique(np.round(draws * 1024).astype(int))
    picked = np.random.default_rng(seed + 1).permutation(distinct)[:size]
    return [int(value) for value in picked]


def expected(row: list[int], token_ids: list[int], case: dict[str, Any]) -> dict[str, Any]:
    processors = LogitsProcessorList()
    if "repetition_penalty" in case:
        processors.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    if "temperature" in case:
        processors.append(TemperatureLogitsWarper(case["temperature"]))
    if "top_k" in case:
        processors.append(TopKLogitsWarper(case["top_k"]))
    if "top_p" in case:
        processors.append(TopPLogitsWarper(case["top_p"]))
    if "typical_p" in case:
        processors.append(TypicalLogitsWarper(case["typical_p"]))
    scores = torch.tensor([row], dtype=torch.float64) / 1024
    scores = processors(torch.tensor([token_ids]), scores)
    chances = scores.softmax(-1)[0]
    ids = torch.isfinite(scores[0]).nonzero()[:, 0]
    # Of a long result every 16th probability is kept.
    step = 1 if len(ids) <= 64 else 16
    return {
        "params": case,
        "ids": ids.tolist() if len(ids) < len(row) else "all",
        "step": step,
        "probabilities": [float(f"{p:.10g}") for p in chances[ids][::step].tolist()],
    }


def main() -> None:
    rows = []
    for size, spread, seed in ((48, 3.0, 1), (2000, 2.5, 3)):
        row = logits(size, spread, seed)
        token_ids = [int(i) for i in np.random.default_rng(seed + 2).integers(0, size, 30)]
        # The best and a repeated token, so that the penalty matters.
        token_ids += [int(np.argmax(row)), token_ids[0]]
        cases = [expected(row, token_ids, case) for case in CASES]
        rows.append({"logits_times_1024": row, "token_ids": token_ids, "cases": cases})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    text = json.dumps({"versions": versions, "rows": rows}, separators=(",", ":"))
    Path(__file__).with_name("reference.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
