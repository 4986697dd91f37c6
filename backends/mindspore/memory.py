"""How many KV blocks fit, and the limits that follow. Arithmetic over the plan; no MindSpore."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindstream.backends.mindspore.config import NUM_BLOCKS, ModelPlan
from mindstream.backends.mindspore.weights import TensorEntry
from mindstream.plugin.backend import Limits
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment

_GIB = 1 << 30
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
# MindSpore, its compiled graphs and activations, measured on CPU.
_RUNTIME_BYTES = 700 << 20
# The rest is for what grows with the batch: activations, logits, the front end.
_SHARE_OF_WHAT_IS_LEFT = 0.8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that one weight and one element of the KV cache take."""

    weight: float
    kv: int

    @classmethod
    def on_device(cls, plan: ModelPlan) -> Sizes:
        """As MindFormers keeps them where no kernels of ours do."""
        size = KV_BYTES[str(plan.model_config.get("compute_dtype", "bfloat16"))]
        return cls(size, size)


def cache_blocks(
    deployment: Deployment,
    plan: ModelPlan,
    entries: Mapping[str, TensorEntry],
    sizes: Sizes,
    available: int | None = None,
) -> int:
    """Blocks of the KV cache: serving.kv_cache_gib's, else the yaml's, else of what is left.

    `available` bytes are the host's unless given. Raises ConfigError.
    """
    gib, block = deployment.serving.kv_cache_gib, plan.kv_block_bytes(sizes.kv)
    if gib == 0:
        return plan.num_blocks or _what_is_left(deployment, plan, entries, sizes, available)
    blocks = int(gib * _GIB / block)
    if blocks < 1:
        raise ConfigError(
            f"{deployment.path.name}: serving.kv_cache_gib is {gib}, less than one block of "
            f"{plan.block_size} tokens, which takes {block / _GIB:.4f} GiB."
        )
    return blocks


def _what_is_left(
    deployment: Deployment,
    plan: ModelPlan,
    entries: Mapping[str, TensorEntry],
    sizes: Sizes,
    available: int | None,
) -> int:
    """A share of the memory behind the weights, but no more than all slots can fill."""
    if available is None:
        available = available_bytes() if plan.device == "CPU" else _device_bytes(deployment)
    if available is None:
        return NUM_BLOCKS
    left = available - _weight_bytes(entries, sizes) - _RUNTIME_BYTES
    blocks = int(_SHARE_OF_WHAT_IS_LEFT * left / plan.kv_block_bytes(sizes.kv))
    length = deployment.serving.max_seq_len or plan.max_positions
    most = deployment.serving.max_batch_size * math.ceil(length / plan.block_size)
    return max(1, min(blocks, most))


def _weight_bytes(entries: Mapping[str, TensorEntry], sizes: Sizes) -> float:
    return sizes.weight * sum(math.prod(entry.shape) for entry in entries.values())


def _device_bytes(deployment: Deployment) -> int | None:
    """What the yaml lets MindSpore take of the device; None if it does not say."""
    context = deployment.mindformers.get("context")
    given = context.get("max_device_memory") if isinstance(context, Mapping) else None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", str(given))
    return int(float(found[1]) * _GIB) if found else None


def limits(deployment: Deployment, plan: ModelPlan, num_blocks: int) -> Limits:
    """Raises ConfigError if serving.max_seq_len is more than the model or the cache can hold."""
    name, asked = deployment.path.name, deployment.serving.max_seq_len
    held = num_blocks * plan.block_size
    if asked > plan.max_positions:
        raise ConfigError(
            f"{name}: serving.max_seq_len is {asked}, but config.json allows "
            f"max_position_embeddings {plan.max_positions}."
        )
    if asked > held:
        raise ConfigError(
            f"{name}: serving.max_seq_len is {asked}, but the KV cache holds {held} tokens "
            f"({num_blocks} blocks of {plan.block_size}); raise serving.kv_cache_gib or num_blocks."
        )
    return Limits(
        vocab_size=plan.vocab,
        max_seq_len=asked or min(plan.max_positions, held),
        max_batch_size=deployment.serving.max_batch_size,
        block_size=plan.block_size,
        num_blocks=num_blocks,
    )


def check_host(
    deployment: Deployment,
    plan: ModelPlan,
    entries: Mapping[str, TensorEntry],
    num_blocks: int,
    sizes: Sizes,
    available: int | None = None,
) -> None:
    """Refuses a CPU deployment that the machine's memory cannot hold. Raises ConfigError."""
    free = available_bytes() if available is None else available
    weights, cache = _weight_bytes(entries, sizes), num_blocks * plan.kv_block_bytes(sizes.kv)
    if free is None or weights + cache + _RUNTIME_BYTES <= free:
        return
    raise ConfigError(
        f"{deployment.path.name}: a KV cache of {num_blocks} blocks takes {cache / _GIB:.1f} GiB "
        f"beside {weights / _GIB:.1f} GiB of weights and {_RUNTIME_BYTES / _GIB:.1f} GiB of "
        f"MindSpore, but {free / _GIB:.1f} GiB of memory are available; lower "
        "serving.kv_cache_gib or model.model_config.num_blocks."
    )


def available_bytes() -> int | None:
    """Memory this process may still take, its control group included; None if nothing says."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            cached = _file_cache(group / "memory.stat")
            found.append(int(limit) - used + cached)
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def _file_cache(stat: Path) -> int:
    """Bytes of the group's usage that the system takes back when memory is asked for."""
    for line in stat.read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
