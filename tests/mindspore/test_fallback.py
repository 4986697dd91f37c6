"""A model whose shape the fused kernels cannot take is served all the same, and says so once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytestmark = pytest.mark.model
BLOCKS = [5, 2, 9]
TOKENS = 12


def generate(model: Any, prompt: list[int]) -> tuple[list[int], NDArray[np.float32]]:
    """Ids through the paged cache, each the best that was not said yet, and their logits.

    Left alone, a small random model soon says one id again and again.
    """
    rows: list[NDArray[np.float32]] = []
    ids: list[int] = []
    new, done = prompt, 0
    while len(ids) < TOKENS:
        rows.append(model.step([(new, done, BLOCKS)])[0])
        ids.append(next(int(i) for i in np.argsort(-rows[-1]) if i not in ids))
        new, done = ids[-1:], done + len(new)
    return ids, np.array(rows)


@pytest.mark.parametrize(
    ("name", "changes", "shape"),
    [
        ("tiny-qwen3", {"head_dim": 24}, "head_dim 24"),
        ("tiny-qwen3", {"hidden_size": 72}, "hidden_size 72"),
        ("tiny-qwen2", {"hidden_size": 120}, "hidden_size 120"),  # and heads of 30
        ("tiny-llama", {"intermediate_size": 100}, "intermediate_size 100"),
    ],
)
def test_auto_takes_the_compiled_attention_and_gives_the_ids_of_stock(
    tiny: ModuleType,
    tiny_deployment: Callable[..., Path],
    lab: Any,
    name: str,
    changes: dict[str, int],
    shape: str,
) -> None:
    folder = tiny_deployment(name, num_hidden_layers=2, **changes)
    size = {"model__model_config__block_size": "16"}
    found, lines = {}, {}
    for kernels in ("stock", "auto"):
        model = lab.load(folder, cpu__kernels=kernels, **size)
        lines[kernels] = model.logged()
        found[kernels] = generate(model, tiny.PROMPT)
    assert not any("WARNING" in line for line in lines["stock"])
    (line,) = (line for line in lines["auto"] if "WARNING" in line)
    assert line.startswith(f"WARNING serving.cpu.kernels auto: {shape} is not a multiple of 32")
    assert "; 'attention' runs (" in line
    assert any(": attention " in line and " kernels, " in line for line in lines["auto"])
    ids, logits = found["auto"]
    assert ids == found["stock"][0]
    assert np.abs(logits - found["stock"][1]).max() < 1e-4
