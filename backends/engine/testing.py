"""A StepModel for tests: random-looking, batch invariant, and honest about its KV cache.

What it keeps for a token depends on all tokens before it, which it reads through the block tables.
So any error of the engine in block tables, slot mapping, positions, prefix cache, chunking or
preemption changes the tokens, and `reference_tokens` says what they must be.

`Deployment.mindformers["hash_model"]` may hold the fields of `HashModelConfig`.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mindstream.backends.engine.sampler import Sampler, SampleRow
from mindstream.backends.engine.step_model import Batch, Float32
from mindstream.plugin.backend import Limits
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import GenerationRequest

VOCAB = 50
# Prompt tokens that break things.
RAISES, GIVES_NAN, EXITS, PRINTS = VOCAB, VOCAB + 1, VOCAB + 2, VOCAB + 3

_UInt64 = NDArray[np.uint64]
_ROUNDS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HashModelConfig:
    """Sizes, and ways to misbehave."""

    num_blocks: int = 64
    block_size: int = 4
    max_seq_len: int = 0  # 0: the whole cache
    step_ms: float = 0.0
    refuse: str = ""  # load() raises ConfigError with this
    exit_while_loading: bool = False


def _mix(value: _UInt64) -> _UInt64:
    """SplitMix64's finaliser."""
    value = (value ^ (value >> np.uint64(30))) * _ROUNDS[0]
    value = (value ^ (value >> np.uint64(27))) * _ROUNDS[1]
    return value ^ (value >> np.uint64(31))


def _state(before: np.uint64, token: int, position: int) -> np.uint64:
    """What the cache keeps for a token."""
    word = np.uint64((token + 1) * 1_000_003 + position)
    return np.uint64(_mix(np.array([before ^ word], np.uint64))[0])


def _logits(states: _UInt64) -> Float32:
    """[R] states to [R, VOCAB] numbers in [0, 8)."""
    spread = np.arange(1, VOCAB + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = _mix(states[:, None] + spread[None, :])
    return ((words >> np.uint64(40)).astype(np.float64) / 2**21).astype(np.float32)


class HashModel:
    """See the module."""

    def __init__(self, deployment: Deployment) -> None:
        self.config = HashModelConfig(**deployment.mindformers.get("hash_model", {}))
        slots = self.config.num_blocks * self.config.block_size
        self._cache: _UInt64 = np.zeros(slots, np.uint64)

    def load(self) -> Limits:
        """See `StepModel.load`."""
        config = self.config
        log.info("loading weights")
        if config.refuse:
            raise ConfigError(config.refuse)
        if config.exit_while_loading:
            print("no device here", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        length = config.max_seq_len or config.num_blocks * config.block_size
        return Limits(VOCAB, length, 1024, config.block_size, config.num_blocks)

    def forward(self, batch: Batch) -> Float32:
        """See `StepModel.forward`."""
        if self.config.step_ms:
            time.sleep(self.config.step_ms / 1000)
        self._misbehave(batch)
        states = self._states(batch)
        logits = _logits(states[batch.logits_rows])
        for row, index in enumerate(batch.logits_rows):
            if batch.token_ids[index] == GIVES_NAN:
                logits[row] = np.nan
        return logits

    def close(self) -> None:
        """See `StepModel.close`."""
        log.info("closed")

    def _misbehave(self, batch: Batch) -> None:
        tokens = set(batch.token_ids.tolist())
        if PRINTS in tokens:
            print("noise on stdout", flush=True)
        if EXITS in tokens:
            os._exit(7)
        if RAISES in tokens:
            raise RuntimeError("the device is unwell")

    def _states(self, batch: Batch) -> _UInt64:
        states = np.zeros(len(batch.token_ids), np.uint64)
        row = 0
        for index, count in enumerate(batch.q_seq_lens.tolist()):
            position = int(batch.context_lens[index])
            state = self._read(batch.block_tables[index].tolist(), position - 1)
            for _ in range(count):
                if batch.positions[row] != position:
                    raise ValueError(f"row {row} has position {batch.positions[row]}")
                state = _state(state, int(batch.token_ids[row]), position)
                states[row] = self._cache[batch.slot_mapping[row]] = state
                position, row = position + 1, row + 1
        return states

    def _read(self, table: list[int], position: int) -> np.uint64:
        if position < 0:
            return np.uint64(0)
        block, offset = divmod(position, self.config.block_size)
        if table[block] < 0:
            raise ValueError(f"position {position} has no block")
        return np.uint64(self._cache[table[block] * self.config.block_size + offset])


def reference_tokens(request: GenerationRequest) -> list[int]:
    """What `HashModel` must answer, computed from the whole history without any cache."""
    history, output = list(request.prompt_ids), list[int]()
    sampler = Sampler(None)
    state = np.uint64(0)
    for position, token in enumerate(history):
        state = _state(state, token, position)
    while request.generated_before + len(output) < request.max_new_tokens:
        index = request.generated_before + len(output)
        row = SampleRow(request.sampling, history, index, request.eos_token_ids)
        token = sampler.sample(_logits(np.array([state], np.uint64)), [row])[0]
        state = _state(state, token, len(history))
        output.append(token)
        history.append(token)
        if token in request.eos_token_ids:
            break
    return output


def is_alive(pid: int) -> bool:
    """A zombie, which only its parent can bury, is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"
