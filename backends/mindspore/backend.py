"""`MindSporeBackend`: the shared engine over MindFormers graphs. On the event loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mindstream.backends.engine import EngineBackend
from mindstream.plugin.model_config import Deployment

_STEP_MODEL = "mindstream.backends.mindspore.step_model:MindSporeStepModel"


class MindSporeBackend(EngineBackend):
    """Registered as the entry point `mindspore`."""

    defaults_rule = "ms"  # an absent top_k comes from the yaml, else it is off

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment, _STEP_MODEL)

    @staticmethod
    def selftest(deployment: Deployment, report: Path, say: Callable[[str], None]) -> bool:
        """What `mindstream selftest` runs; True if every check passed. Blocks for minutes."""
        from mindstream.backends.mindspore.selftest import run_selftest

        return run_selftest(deployment, report, say)
