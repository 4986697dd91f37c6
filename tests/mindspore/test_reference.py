"""Logits and greedy ids against HF transformers in float32 (tests/goldens)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.model
BLOCKS = [5, 2, 9, 0, 7, 1, 8]  # in no order: nothing may depend on it


@pytest.mark.parametrize("key", ["gravity", "france"])
def test_demo_model_continues_as_the_reference(
    demo: Any, goldens: dict[str, Any], key: str
) -> None:
    prompt, expected = goldens[key]["prompt_ids"], goldens[key]["greedy_ids"]
    logits = demo.step([(prompt, 0, BLOCKS)])[0]
    ids = goldens[f"{key}_ids"]
    assert np.abs(logits[ids] - goldens[f"{key}_logits"]).max() < 1e-3
    out = [int(logits.argmax())]
    while len(out) < len(expected):
        done = len(prompt) + len(out) - 1
        out.append(int(demo.step([([out[-1]], done, BLOCKS)])[0].argmax()))
    assert out == expected


@pytest.mark.parametrize(
    ("name", "dtype", "shards", "kernels"),
    [
        ("tiny-qwen2", "F32", 1, "attention"),
        ("tiny-qwen2", "BF16", 2, "stock"),
        ("tiny-qwen2", "F16", 1, "fused"),
        ("tiny-qwen3", "F16", 1, "attention"),
        ("tiny-qwen3", "BF16", 1, "fused"),
        ("tiny-llama", "BF16", 2, "attention"),
        ("tiny-llama", "F32", 1, "fused"),
    ],
)
def test_small_models_agree_at_every_position(
    tiny: ModuleType,
    tiny_deployment: Callable[..., Path],
    lab: Any,
    goldens: dict[str, Any],
    name: str,
    dtype: str,
    shards: int,
    kernels: str,
) -> None:
    folder = tiny_deployment(name, dtype, shards)
    size = {"model__model_config__block_size": "16" if kernels == "fused" else "4"}
    model = lab.load(folder, cpu__kernels=kernels, cpu__weights="f32", **size)
    prompt, reference = tiny.PROMPT, goldens[name]
    full = model.step([(prompt, 0, BLOCKS)], rows=range(len(prompt)))
    assert np.abs(full - reference).max() < 1e-4
    # The same through the paged cache: a chunk, then one token a step.
    chunk = model.step([(prompt[:5], 0, BLOCKS)])
    steps = [model.step([([prompt[i]], i, BLOCKS)]) for i in range(5, len(prompt))]
    assert np.abs(np.concatenate([chunk, *steps]) - reference[4:]).max() < 1e-4
