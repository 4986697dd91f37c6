"""How many KV blocks a deployment gets, and when the machine's memory is too small for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from mindstream.backends.mindspore import memory, weights
from mindstream.backends.mindspore.config import ModelPlan, plan_model
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment, load_deployment

FLOAT32 = memory.Sizes(weight=4, kv=4)
BLOCK = 2 * 3 * 4 * 2 * 32 * 4  # k and v, layers, tokens, kv heads, head_dim, bytes
Planned = tuple[Deployment, ModelPlan, dict[str, weights.TensorEntry]]
Plan = Callable[..., Planned]


@pytest.fixture
def planned(tiny: ModuleType, tmp_path: Path) -> Plan:
    """A tiny model's deployment with `num_blocks` of the yaml, if any, and the given blocks."""
    folder = Path(tiny.write_model(tmp_path / "tiny", "tiny-qwen2"))

    def plan(
        num_blocks: int = 0, *, device: str = "CPU", limit: str = "", **serving: int
    ) -> Planned:
        sizes = {"block_size": 4} | ({"num_blocks": num_blocks} if num_blocks else {})
        context = {"device_target": device} | ({"max_device_memory": limit} if limit else {})
        value = {"use_legacy": False, "model": {"model_config": sizes}, "context": context}
        path = folder / "deploy.yaml"
        path.write_text(yaml.safe_dump(value | {"serving": serving}))
        deployment = load_deployment(path)
        found = plan_model(deployment)
        return deployment, found, weights.read_headers(found.model_dir)

    return plan


def blocks(planned: Planned, available: int | None = None) -> int:
    return memory.cache_blocks(*planned, FLOAT32, available)


def held(planned: Planned) -> int:
    """Bytes of the weights and of MindSpore."""
    return 4 * sum(math.prod(entry.shape) for entry in planned[2].values()) + (700 << 20)


def test_too_little_memory_names_both_sizes(planned: Plan) -> None:
    deployment, plan, entries = planned(64)
    with pytest.raises(
        ConfigError, match=r"64 blocks takes .* but 0.5 GiB of memory are available"
    ):
        memory.check_host(deployment, plan, entries, 64, FLOAT32, available=1 << 29)
    memory.check_host(deployment, plan, entries, 64, FLOAT32, available=1 << 31)


def test_the_cache_is_as_large_as_the_deployment_says(planned: Plan) -> None:
    assert blocks(planned(64)) == 64
    assert blocks(planned(64, kv_cache_gib=1)) == (1 << 30) // BLOCK


def test_a_deployment_that_says_nothing_gets_what_is_left(planned: Plan) -> None:
    unsaid = planned()
    assert blocks(unsaid, held(unsaid) + 100 * BLOCK) == 80
    assert blocks(unsaid, held(unsaid) - 1) == 1  # which check_host refuses


def test_the_cache_is_never_larger_than_all_slots_can_fill(planned: Plan) -> None:
    few = planned(max_batch_size=3, max_seq_len=10)
    assert blocks(few, 1 << 34) == 3 * 3


@pytest.mark.parametrize("limit", ["1.5GB", "1.5 GB"])
def test_on_a_device_the_yaml_says_what_there_is(planned: Plan, limit: str) -> None:
    device = planned(device="Ascend", limit=limit, max_batch_size=4096)
    assert blocks(device) == int(0.8 * ((3 << 29) - held(device)) / BLOCK)
    silent = planned(device="Ascend", max_batch_size=4096)
    assert blocks(silent) == 1024  # MindFormers' own
