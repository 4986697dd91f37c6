"""Memory of the host for what is large and read by address: the KV cache of a CPU deployment."""

from __future__ import annotations

import math
import mmap

import numpy as np

from mindstream.backends.engine.step_model import Float32


def zeros(shape: tuple[int, ...]) -> Float32:
    """float32 zeros that begin at a page and, where the system has them, lie on huge pages.

    The attention reads blocks from all over the cache: with 4 KiB pages address translation alone
    slows it down, and at an odd address every vector lies in two cache lines. A page is taken from
    the system when it is first written to. Raises OSError if there is no address space.
    """
    memory = mmap.mmap(-1, max(1, 4 * math.prod(shape)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float32, math.prod(shape)).reshape(shape)
