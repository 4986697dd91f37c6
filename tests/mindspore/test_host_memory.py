"""The memory of the KV cache, on systems of every kind."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from mindstream.backends.mindspore import host_memory


def test_zeros_begin_at_a_page_and_can_be_written() -> None:
    found = host_memory.zeros((3, 5, 7))
    assert found.shape == (3, 5, 7)
    assert found.dtype == np.float32
    assert found.ctypes.data % mmap.PAGESIZE == 0
    assert not found.any()
    found[2, 4, 6] = 1.5
    assert found.sum() == 1.5


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")  # as without CONFIG_TRANSPARENT_HUGEPAGE

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert host_memory.zeros((2, 3)).shape == (2, 3)


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 62,)])
def test_more_than_there_is_address_space_is_a_memory_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(MemoryError, match=str(4 * shape[0])):
        host_memory.zeros(shape)
