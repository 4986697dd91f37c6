"""What a step computes does not depend on what else is in it, nor on how a prompt was cut.

The fused kernels promise it bit for bit. On MindSpore's own CPU operators it holds to rounding: its
MatMul sums in another order for 1, up to 15, up to about 80 and more rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytestmark = pytest.mark.model
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["attention", "stock", "fused"])
def small(request: pytest.FixtureRequest, tiny_deployment: Callable[..., Path], lab: Any) -> Any:
    """tiny-qwen3 on each of the three kinds of operators, in the smallest blocks they take."""
    kernels = request.param
    settings = {"cpu__kernels": kernels, "cpu__weights": "f32"}
    settings["model__model_config__block_size"] = "16" if kernels == "fused" else "4"
    model = lab.load(tiny_deployment("tiny-qwen3"), **settings)
    model.exact = kernels == "fused"
    return model


def assert_same(model: Any, got: NDArray[np.float32], expected: Any) -> None:
    """Bit for bit where the kernels promise it, else to rounding."""
    if model.exact:
        np.testing.assert_array_equal(got, expected)
    else:
        assert np.abs(got - expected).max() < TOLERANCE


@pytest.fixture(scope="module")
def prompts(tiny: ModuleType) -> list[list[int]]:
    """Lengths around the block size of 4 and the matrix kernels' borders."""
    random = np.random.RandomState(7)
    return [random.randint(0, 256, size).tolist() for size in (1, 3, 4, 5, 8, 17, 30)]


def blocks_of(index: int) -> list[int]:
    """Eight blocks of its own for each sequence, spread over the cache."""
    return [index + 7 * i for i in range(8)]


def alone(model: Any, prompt: list[int], index: int) -> NDArray[np.float32]:
    """Logits [len(prompt), vocab] of one full prefill."""
    logits: NDArray[np.float32] = model.step(
        [(prompt, 0, blocks_of(index))], rows=range(len(prompt))
    )
    return logits


def test_several_prompts_in_one_step(small: Any, prompts: list[list[int]]) -> None:
    expected = [alone(small, prompt, 0)[-1] for prompt in prompts]
    together = small.step([(p, 0, blocks_of(i)) for i, p in enumerate(prompts)])
    assert_same(small, together, expected)


def test_chunks_mixed_with_decodes(small: Any, prompts: list[list[int]]) -> None:
    """Sequences advance by strides of their own in shared steps; each row as in a full prefill."""
    expected = [alone(small, prompt, 0) for prompt in prompts]
    strides = [1, 1, 2, 5, 3, 4, 7]
    done = [0] * len(prompts)
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        active = [i for i, p in enumerate(prompts) if done[i] < len(p)]
        cut = {i: prompts[i][done[i] : done[i] + strides[i]] for i in active}
        got = small.step([(cut[i], done[i], blocks_of(i)) for i in active])
        for row, i in zip(got, active, strict=True):
            done[i] += len(cut[i])
            assert_same(small, row, expected[i][done[i] - 1])


def test_blocks_shared_by_two_sequences(small: Any, prompts: list[list[int]]) -> None:
    """A prefix cache lets sequences read the same blocks: 16 tokens are computed once."""
    long = prompts[6]
    expected = alone(small, long, 0)
    shared = [40, 41, 42, 43][: 16 // small.limits.block_size]
    small.step([(long[:16], 0, shared)])
    both = [(long[16:], 16, [*shared, *range(10, 18)]), (long[16:20], 16, [*shared, 50])]
    got = small.step(both)
    assert_same(small, got, expected[[-1, 19]])


def test_rows_are_chosen_and_none_is_allowed(small: Any, prompts: list[list[int]]) -> None:
    expected = alone(small, prompts[5], 2)
    rows = [0, 3, 16]
    some = small.step([(prompts[5], 0, blocks_of(3))], rows=rows)
    assert_same(small, some, expected[rows])
    # A chunk that is not the last of its prompt: its keys count, its logits do not.
    nothing = small.step([(prompts[5][:9], 0, blocks_of(4))], rows=[])
    assert nothing.shape == (0, 256) and nothing.dtype == np.float32
    rest = small.step([(prompts[5][9:], 9, blocks_of(4))])
    assert_same(small, rest[0], expected[-1])


def test_no_shape_is_compiled_again(small: Any) -> None:
    """Numbers of sequences, new tokens, blocks and wanted rows, as they come in service."""
    before = small.compiled()
    assert before >= 1
    for sequences in (1, 2, 3, 5, 8):
        for new in (1, 2, 7):
            used = [blocks_of(i)[: 1 + (3 * i + new) // 4] for i in range(sequences)]
            batch = [([7] * new, 3 * i, used[i]) for i in range(sequences)]
            assert small.step(batch).shape == (sequences, 256)
            small.step(batch, rows=[])
            small.step(batch, rows=range(sequences * new))
    assert small.compiled() == before


def test_demo_model_mixes_a_decode_with_a_chunked_prompt(
    demo: Any, goldens: dict[str, Any]
) -> None:
    """One sequence decodes its golden ids while another is prefilled two tokens at a time."""
    slow, fast = goldens["france"], goldens["gravity"]
    out = [int(demo.step([(fast["prompt_ids"], 0, [0, 1])])[0].argmax())]
    fed, prompt = 0, slow["prompt_ids"]
    while fed < len(prompt):
        position = len(fast["prompt_ids"]) + len(out) - 1
        chunk = prompt[fed : fed + 2]
        got = demo.step([([out[-1]], position, [0, 1]), (chunk, fed, [2])])
        out.append(int(got[0].argmax()))
        fed += len(chunk)
    assert out == fast["greedy_ids"][: len(out)]
    assert int(got[1].argmax()) == slow["greedy_ids"][0]


def test_the_fused_kernels_choose_the_ids_of_the_largest_logits(
    small: Any, prompts: list[list[int]]
) -> None:
    """In any mix of rows, also where none is wanted; the others give logits all the same."""
    work = [(prompt, 0, blocks_of(i)) for i, prompt in enumerate(prompts)]
    total = sum(map(len, prompts))
    for rows in ([], [0], [3, total - 1], list(range(total))):
        logits = small.step(work, rows)
        found = small.greedy_step(work, rows)
        if small.exact:
            assert found == logits.argmax(1).tolist()
        else:
            np.testing.assert_array_equal(found, logits)
