"""The random numbers of a request, by counter: no state to keep, save or replay."""

from __future__ import annotations

from numpy.random import Philox


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that draws generated token `index` of a request with `seed` (uint64).

    It is `numpy.random.Generator(numpy.random.Philox(key=seed, counter=index)).random()`: the first
    53 bits of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
    times 2**-53. NumPy guarantees that a bit generator's stream never changes (NEP 19).

    A pure function: preemption, recompute and the rest of the batch cannot change it.
    """
    raw: int = Philox(key=seed, counter=index).random_raw()
    return (raw >> 11) * 2.0**-53
