"""Builds MindFormers' model from a plan, fills it and compiles its graphs. Engine thread only."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from mindstream.backends.mindspore import weights
from mindstream.backends.mindspore.config import ModelPlan
from mindstream.backends.mindspore.cpu.kernel_sets import KernelSet, layer_caches
from mindstream.backends.mindspore.environment import quiet
from mindstream.backends.mindspore.graphs import Graphs
from mindstream.backends.mindspore.weights import TensorEntry
from mindstream.plugin.errors import ConfigError


def build(
    plan: ModelPlan,
    headers: Mapping[str, TensorEntry],
    kernels: KernelSet | None,
    num_blocks: int,
) -> Graphs:
    """Without a kernel set (Ascend) nothing of MindFormers is replaced. Raises ConfigError."""
    with quiet():
        with kernels.building() if kernels else nullcontext():
            model = _network(plan)
        if kernels and kernels.owns_weights:
            kernels.load(headers)
        else:
            weights.load(model, plan, headers)
        if kernels:
            kernels.install(model, num_blocks)
            shapes = kernels.cache_shapes(num_blocks)
        else:
            shapes = layer_caches(plan, num_blocks)
        try:
            graphs = Graphs(model, plan, shapes)
            graphs.warm_up()
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            raise ConfigError(
                f"{plan.model_dir}: MindSpore cannot run this {plan.family} model on "
                f"{plan.device}: {_reason(error)}"
            ) from error
    return graphs


def _network(plan: ModelPlan) -> Any:
    """The model class that MindFormers' registry has for the plan's model_type."""
    from mindformers.models.build_config import get_model_config
    from mindformers.models.build_model import build_model
    from mindformers.tools.register import MindFormerConfig

    wanted = MindFormerConfig(model_config=MindFormerConfig(**dict(plan.model_config)))
    try:
        config = get_model_config(wanted)
        model = build_model(MindFormerConfig(model_config=config))
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{plan.model_dir / 'config.json'}: MindFormers cannot build this model: "
            f"{_reason(error)}"
        ) from error
    model.set_train(False)
    return model


def _reason(error: BaseException) -> str:
    """The first line that says something; MindSpore's messages go on for pages."""
    lines = [line.strip("- \t") for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)
