"""The fused kernels at 8,192 tokens: against NumPy in float64, and in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mindstream.backends.mindspore.cpu.fused_weights import FusedShape

HERE = Path(__file__).parent
# layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, block_size, eps, tied
SHAPE = FusedShape(2, 64, 2, 1, 32, 64, 61, 16, 1e-5, True)
LENGTH, CHUNK = 8192, 512
BLOCKS = LENGTH // SHAPE.block_size + 1
SHARPNESS = 6.0  # a few keys of the whole context take most of the attention
SEED = 23
# Of all logits' mean error and of the largest one; their standard deviation is about 1.
TOLERANCE = {"f32": (1e-5, 1e-3), "bf16": (0.03, 1.5)}
Make = Callable[..., Any]
Array = NDArray[Any]

IDS = [int(i) for i in np.random.default_rng(SEED).integers(0, SHAPE.vocab, LENGTH + 1)]
ORDER = [int(i) for i in np.random.default_rng(SEED).permutation(BLOCKS)]


def make(decoder: Make, cache: str) -> Any:
    return decoder(SHAPE, "f32", cache, False, False, SEED, blocks=BLOCKS, sharpness=SHARPNESS)


@pytest.fixture(scope="module")
def reference() -> dict[str, Array]:
    """Filled by the first test that needs it: the weights are the same for each cache."""
    return {}


@pytest.mark.parametrize("cache", ["f32", "bf16"])
def test_8192_tokens_in_chunks_and_one_more_equal_numpy(
    decoder: Make, reference: dict[str, Array], cache: str
) -> None:
    made = make(decoder, cache)
    if not reference:
        reference["logits"] = made.expected(IDS)
    logits = [
        made.run([(IDS[start : start + CHUNK], start, ORDER)]) for start in range(0, LENGTH, CHUNK)
    ]
    logits.append(made.run([(IDS[LENGTH:], LENGTH, ORDER)]))
    error = np.abs(np.concatenate(logits) - reference["logits"])
    print(f"{cache}: mean {error.mean():.2e}, largest {error.max():.2e}")
    assert error.mean() < TOLERANCE[cache][0]
    assert error.max() < TOLERANCE[cache][1]
    # What one wrong block would do to the last rows would be lost in the mean of all.
    assert error[-CHUNK:].mean() < TOLERANCE[cache][0]
    assert error[-1].mean() < 4 * TOLERANCE[cache][0]


@pytest.mark.parametrize("cache", ["f32", "bf16"])
def test_8192_tokens_at_once_have_the_bits_of_chunks(decoder: Make, cache: str) -> None:
    """And so has the next token, decoded beside a short prompt."""
    made = make(decoder, cache)
    rows = [0, CHUNK - 1, CHUNK, LENGTH - CHUNK, LENGTH - 1]
    whole = made.run([(IDS[:LENGTH], 0, ORDER)], rows)
    after = made.run([(IDS[LENGTH:], LENGTH, ORDER)])
    made.keys[:], made.values[:] = np.nan, np.nan
    chunks = [
        made.run([(IDS[start : start + CHUNK], start, ORDER)]) for start in range(0, LENGTH, CHUNK)
    ]
    np.testing.assert_array_equal(np.concatenate(chunks)[rows], whole)
    made.run([([3, 1, 4], 0, [ORDER[-1]])])
    again = made.run([(IDS[LENGTH:], LENGTH, ORDER)])
    np.testing.assert_array_equal(again, after)


GROWTH = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest
from mindstream.backends.mindspore.cpu.fused_weights import FusedShape
length, chunk = int(sys.argv[2]), int(sys.argv[3])
shape = FusedShape(2, 64, 2, 1, 32, 64, 61, 16, 1e-5, True)
made = conftest.Decoder(shape, "bf16", "bf16", False, False, 1, blocks=length // 16)
blocks = list(range(length // 16))
made.run([([1] * 64, 0, blocks)])
def memory(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # from now on the peak is a new one
before = memory("VmRSS")
for start in range(0, length, chunk):
    made.run([([1] * min(chunk, length - start), start, blocks)], [0])
print(memory("VmHWM") - before)
"""


def growth(length: int, chunk: int) -> int:
    """KiB that the peak of a process grows by while it prefills `length` tokens."""
    command = [sys.executable, "-c", GROWTH, str(HERE), str(length), str(chunk)]
    ran = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux' account of a process"
)
SLACK = 8 * 1024  # KiB; the scores of 8,192 tokens would be 262,144 for each head


@needs_proc
def test_memory_of_a_long_prompt_grows_no_faster_than_its_length() -> None:
    short, long = growth(2048, 2048), growth(8192, 8192)
    print(f"{short} KiB at 2,048 tokens, {long} KiB at 8,192")
    assert long <= 4 * 1.5 * short + SLACK


@needs_proc
def test_memory_of_a_chunk_does_not_depend_on_what_is_cached() -> None:
    short, long = growth(2048, CHUNK), growth(8192, CHUNK)
    print(f"{short} KiB at 2,048 tokens, {long} KiB at 8,192")
    assert long <= short + SLACK
