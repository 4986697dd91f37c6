"""MindFormers' mcore inference models behind the StepModel seam. Engine thread only."""

from __future__ import annotations

import logging
import os
import time

from mindstream.backends.engine.step_model import Batch, Chosen, Float32
from mindstream.backends.mindspore import environment, graph_cache, memory, weights
from mindstream.backends.mindspore.builder import build
from mindstream.backends.mindspore.config import plan_model
from mindstream.backends.mindspore.cpu.kernel_sets import select
from mindstream.backends.mindspore.cpu.library import instruction_set
from mindstream.backends.mindspore.graphs import Graphs
from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import Deployment

log = logging.getLogger("mindstream.mindspore")


class MindSporeStepModel:
    """Prefill, decode and every mix of a MindFormers model. MindSpore is imported by `load`."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._graphs: Graphs | None = None
        self.kernels = ""  # the CPU kernel set in use; "MindFormers" where nothing is replaced

    def load(self) -> Limits:
        """Checks everything that can be checked cheaply first, then builds, fills and compiles."""
        deployment = self._deployment
        plan = plan_model(deployment)
        headers = weights.read_headers(plan.model_dir)
        weights.check(headers, plan)
        kernels = select(deployment.serving.cpu, plan) if plan.device == "CPU" else None
        sizes = (
            memory.Sizes(kernels.weight_bytes, memory.KV_BYTES[kernels.kv_dtype])
            if kernels
            else memory.Sizes.on_device(plan)
        )
        num_blocks = memory.cache_blocks(deployment, plan, headers, sizes)
        limits = memory.limits(deployment, plan, num_blocks)
        if kernels:
            memory.check_host(deployment, plan, headers, num_blocks, sizes)
        settings = environment.Settings(
            device=plan.device,
            threads=deployment.serving.cpu.threads or environment.core_count(),
        )
        began = time.monotonic()
        environment.prepare(settings, deployment.mindformers)
        imported = time.monotonic()
        with graph_cache.owned(graph_cache.folder(plan, kernels.name if kernels else "none")):
            self._graphs = build(plan, headers, kernels, num_blocks)
        self.kernels = kernels.name if kernels else "MindFormers"
        log.info("%s: %s kernels, %d KV blocks", deployment.name, self._described(), num_blocks)
        built = time.monotonic() - imported  # benchmarks/model_scenarios.py reads this line
        log.info("loaded: imports %.2f s, weights and graph %.2f s", imported - began, built)
        return limits

    def _described(self) -> str:
        """The kernel set with the instruction set it runs on, if it has one."""
        if self.kernels not in ("fused", "attention"):
            return self.kernels
        chosen, asked = instruction_set(), os.environ.get("MINDSTREAM_CPU_ISA", "")
        if asked not in ("", chosen):
            log.warning("MINDSTREAM_CPU_ISA is %r, which this CPU or build does not have", asked)
        return f"{self.kernels} {chosen}"

    def forward(self, batch: Batch) -> Float32 | Chosen:
        """One step on the device; `load` must have returned."""
        if self._graphs is None:
            raise RuntimeError("MindSporeStepModel.forward needs load() first")
        return self._graphs.run(batch)

    def close(self) -> None:
        """Drops graphs, weights and cache; MindSpore's context lives as long as the process."""
        self._graphs = None
