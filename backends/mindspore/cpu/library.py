"""Finds the compiled kernels. Called on the engine thread; needs no MindSpore."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path


def library_path() -> Path | None:
    """The kernels' shared library, or None where `pip install` found no C++ compiler.

    MINDSTREAM_KERNELS names another build of it, such as one with sanitizers.
    """
    path = Path(os.environ.get("MINDSTREAM_KERNELS") or Path(__file__).with_name("_kernels.so"))
    return path if path.is_file() else None


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The library for ctypes: the same instance, threads included, that MindSpore's operators use.

    Raises FileNotFoundError if it was not built, OSError if it does not load.
    """
    path = library_path()
    if path is None:
        raise FileNotFoundError(
            "mindstream's CPU kernels were not built: no C++ compiler was found"
        )
    library = ctypes.CDLL(str(path))
    library.mindstream_isa.restype = ctypes.c_char_p
    library.mindstream_error.restype = ctypes.c_char_p
    library.mindstream_set_threads.argtypes = [ctypes.c_int]
    return library


def set_threads(count: int) -> None:
    """Threads of the kernels from the next operator on; 0: one a core."""
    load_library().mindstream_set_threads(count)


def instruction_set() -> str:
    """What the kernels run on: `portable`, `avx2`, `avx512`, `avx512bf16` or `amx`."""
    return str(load_library().mindstream_isa().decode())
