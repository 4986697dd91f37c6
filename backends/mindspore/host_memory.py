"""Memory of the host for what is large and read by address: the KV cache of a CPU deployment."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

from mindstream.backends.engine.step_model import Float32


def zeros(shape: tuple[int, ...]) -> Float32:
    """float32 zeros that begin at a page and, where the system has them, lie on huge pages.

    The attention reads blocks from all over the cache: with 4 KiB pages address translation alone
    slows it down, and at an odd address every vector lies in two cache lines. A page is taken from
    the system when it is first written to. Raises MemoryError if there is no address space.
    """
    size = max(1, 4 * math.prod(shape))
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no address space for {size} bytes of KV cache: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float32, math.prod(shape)).reshape(shape)
