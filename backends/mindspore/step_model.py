"""MindFormers' mcore inference models behind the StepModel seam. Engine thread only."""

from __future__ import annotations

import logging
from typing import Any

from mindstream.backends.engine.step_model import Batch, Float32
from mindstream.backends.mindspore import environment, graph_cache, memory, weights
from mindstream.backends.mindspore.builder import build
from mindstream.backends.mindspore.config import plan_model
from mindstream.backends.mindspore.cpu.kernel_sets import select
from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import Deployment

log = logging.getLogger("mindstream.mindspore")


class MindSporeStepModel:
    """Prefill, decode and every mix of a MindFormers model. MindSpore is imported by `load`."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._graphs: Any = None

    def load(self) -> Limits:
        """Checks everything that can be checked cheaply first, then builds, fills and compiles."""
        deployment = self._deployment
        plan = plan_model(deployment)
        headers = weights.read_headers(plan.model_dir)
        weights.check(headers, plan)
        kernels = select(deployment.serving.cpu, plan) if plan.device == "CPU" else None
        num_blocks = memory.cache_blocks(deployment, plan, kernels.kv_dtype if kernels else None)
        limits = memory.limits(deployment, plan, num_blocks)
        if plan.device == "CPU":
            memory.check_host(deployment, plan, headers, num_blocks)
        settings = environment.Settings(
            device=plan.device,
            threads=deployment.serving.cpu.threads or environment.core_count(),
        )
        environment.prepare(settings, deployment.mindformers)
        with graph_cache.owned(graph_cache.folder(plan, kernels.name if kernels else "none")):
            self._graphs = build(plan, headers, kernels, num_blocks)
        log.info(
            "%s: %s kernels, %d KV blocks", deployment.name, kernels and kernels.name, num_blocks
        )
        return limits

    def forward(self, batch: Batch) -> Float32:
        """One step on the device; `load` must have returned."""
        return self._graphs.run(batch)  # type: ignore[no-any-return]  # MindSpore ships no types

    def close(self) -> None:
        """Drops graphs, weights and cache; MindSpore's context lives as long as the process."""
        self._graphs = None
