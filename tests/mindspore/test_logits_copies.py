"""A step's logits are not copied on their way to the sampler: it reads the graph's own memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindstream.backends.engine.sampler import SampleRow
from mindstream.plugin.request import SamplingParams

pytestmark = pytest.mark.model


@pytest.mark.parametrize("kernels", ["fused", "attention", "stock"])
def test_forward_gives_the_memory_that_the_graph_wrote(
    tiny_deployment: Callable[..., Path], lab: Any, kernels: str
) -> None:
    size = {"model__model_config__block_size": "16"}
    model = lab.load(tiny_deployment("tiny-llama"), cpu__kernels=kernels, **size)
    found = model.watch([(list(range(40)), 0, [4, 1, 3])], [], rows=range(40))
    assert found["shared"] and found["logits"] == 40 * 256 * 4
    assert found["peak"] < found["logits"] / 2


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(do_sample=False), SamplingParams(do_sample=True, top_k=50, top_p=0.9)],
    ids=["greedy", "top-k"],
)
def test_forward_and_sampling_allocate_less_than_one_row(
    demo: Any, sampling: SamplingParams
) -> None:
    sequences = [([7, 40 + row], 0, [row]) for row in range(8)]
    rows = [SampleRow(sampling, [7, 40 + row], 0) for row in range(8)]
    demo.watch(sequences, rows)  # the first call imports and compiles
    found = demo.watch(sequences, rows)
    assert found["shared"] and len(found["tokens"]) == 8
    assert found["peak"] < found["logits"] / 8
