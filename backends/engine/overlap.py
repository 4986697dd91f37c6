"""The engine loop that samples beside the device: two groups of sequences take turns.

While the model's thread computes a step of one group, the engine's thread samples the other's last
step, reports it and schedules its next one. A request's tokens are those of the plain loop, for
they depend on the request alone; which steps they come from differs.

It pays where sampling takes longer than what a step costs whatever its size, since each group costs
that once a token: see `benchmarks/README.md`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mindstream.backends.engine.loop import Clock, Engine, Samples
from mindstream.backends.engine.scheduler import Step
from mindstream.backends.engine.step_model import Batch, Chosen, Float32, StepModel
from mindstream.plugin.backend import Limits
from mindstream.plugin.serving_config import ServingConfig

_GROUPS = 2


class ModelThread:
    """A StepModel whose every call, its making included, is made by one thread of its own."""

    def __init__(self, make: Callable[[], StepModel]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._model = self._thread.submit(make).result()
        self._latest: Future[Float32 | Chosen] | None = None
        self._closed = False

    def load(self) -> Limits:
        """See `StepModel.load`."""
        return self._thread.submit(self._model.load).result()

    def begin(self, batch: Batch) -> Future[Float32 | Chosen]:
        """`StepModel.forward`, after those begun before it; does not wait."""
        self._latest = self._thread.submit(self._model.forward, batch)
        return self._latest

    def forward(self, batch: Batch) -> Float32 | Chosen:
        """See `StepModel.forward`."""
        return self.begin(batch).result()

    def close(self) -> None:
        """See `StepModel.close`. Waits for the step under way; one that only queues is dropped.

        The thread has ended afterwards.
        """
        if self._closed:
            return
        self._closed = True
        if self._latest is not None:
            self._latest.cancel()
        self._thread.submit(self._model.close).result()
        self._thread.shutdown()


class OverlapEngine(Engine):
    """An `Engine` with up to two steps in flight; `step` completes the older one."""

    def __init__(
        self,
        model: ModelThread,
        limits: Limits,
        serving: ServingConfig,
        sampler: Samples,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(model, limits, serving, sampler, clock, _GROUPS)
        self._thread = model
        self._in_flight: deque[tuple[Step, Future[Float32 | Chosen]]] = deque()

    @property
    def idle(self) -> bool:
        """`step` would do nothing: also no step is in flight, for it holds KV blocks."""
        return super().idle and not self._in_flight

    def step(self, receive: Callable[[], None] = lambda: None) -> None:
        """Keeps the device busy and completes one step. As in the plain loop, `receive` is called
        after the device has worked on it, and a `forward` that raises ends the requests of its
        step, not those of the other one in flight.
        """
        self._launch()
        if self._in_flight:
            step, logits = self._in_flight.popleft()
            self._land(step, logits.result, receive)

    def _launch(self) -> None:
        while len(self._in_flight) < _GROUPS:
            step = self.scheduler.schedule(self._clock())
            if step is None:
                break
            self._in_flight.append((step, self._thread.begin(step.batch)))


def make_model(factory: Callable[[], StepModel], serving: ServingConfig) -> StepModel:
    """The model for `make_engine`: on a thread of its own if `serving.overlap`."""
    return ModelThread(factory) if serving.overlap else factory()


def make_engine(
    model: StepModel,
    limits: Limits,
    serving: ServingConfig,
    sampler: Samples,
    clock: Clock = time.monotonic,
) -> Engine:
    """The loop that suits what `make_model` gave, which `limits` were loaded from."""
    if isinstance(model, ModelThread):
        return OverlapEngine(model, limits, serving, sampler, clock)
    return Engine(model, limits, serving, sampler, clock)
