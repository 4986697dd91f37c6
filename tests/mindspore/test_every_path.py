"""The demo model on each CPU path against HF transformers: kernels, weights and instruction sets.

One process an instruction set, for the kernels choose theirs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mindstream.backends.mindspore.cpu.library import library_path

pytestmark = pytest.mark.model
BLOCKS = [5, 2, 9, 0, 7, 1, 8]
# Largest error of a logit. The logits reach from about -20 to 20.
TOLERANCE = {"f32": 1e-3, "bf16": 0.4, "int8": 1.2}
# Greedy ids up to the first one that leads the next by less than twice what rounding was seen to
# move: the ninth of `gravity` leads by 0.09 in float32, the sixth of `france` by 0.22.
SURE = {
    "f32": {"gravity": 10, "france": 10},
    "bf16": {"gravity": 8, "france": 10},
    "int8": {"gravity": 8, "france": 5},
}


@pytest.fixture(scope="module", params=["portable", "avx2", "avx512", "avx512bf16", "amx"])
def on_instruction_set(
    request: pytest.FixtureRequest, start_worker: Callable[..., Any]
) -> Iterator[Any]:
    if library_path() is None:
        pytest.skip("the kernels are not built")
    worker = start_worker(MINDSTREAM_CPU_ISA=request.param)
    found = worker.instruction_set()
    if found != request.param:
        worker.close()
        pytest.skip(f"this CPU or build has no {request.param}")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def on_best(start_worker: Callable[..., Any]) -> Iterator[Any]:
    worker = start_worker()
    yield worker
    worker.close()


def assert_continues(worker: Any, goldens: dict[str, Any], kernels: str, weights: str) -> None:
    """Each prompt at once, then a token a step."""
    small = {"model__model_config__num_blocks": "16", "max_seq_len": "256"}
    worker.load("smollm2-135m", cpu__kernels=kernels, cpu__weights=weights, **small)
    for key, sure in SURE[weights].items():
        prompt, expected = goldens[key]["prompt_ids"], goldens[key]["greedy_ids"][:sure]
        logits = worker.step([(prompt, 0, BLOCKS)])[0]
        error = np.abs(logits[goldens[f"{key}_ids"]] - goldens[f"{key}_logits"]).max()
        assert error < TOLERANCE[weights], key
        out = [int(logits.argmax())]
        while len(out) < len(expected):
            step = [([out[-1]], len(prompt) + len(out) - 1, BLOCKS)]
            out.append(int(worker.step(step)[0].argmax()))
            if kernels == "fused":
                assert worker.greedy_step(step) == out[-1:]
        assert out == expected, key


@pytest.mark.parametrize("weights", ["bf16", "int8", "f32"])
def test_fused_kernels_continue_as_the_reference_on_every_instruction_set(
    on_instruction_set: Any, goldens: dict[str, Any], weights: str
) -> None:
    assert_continues(on_instruction_set, goldens, "fused", weights)


@pytest.mark.parametrize("kernels", ["attention", "stock"])
def test_the_other_kernels_continue_as_the_reference(
    on_best: Any, goldens: dict[str, Any], kernels: str
) -> None:
    if kernels == "attention" and library_path() is None:
        pytest.skip("the kernels are not built")
    assert_continues(on_best, goldens, kernels, "f32")
