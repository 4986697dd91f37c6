"""The engine loop: receive, schedule, forward, apply the cancels that came meanwhile, deliver.

One thread runs it and makes every call of the StepModel. It is deliberately plain: the oracle for
`overlap.py`, which samples beside the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mindstream.backends.engine.messages import Cancel, Delta, Failure, Report, Stop, Submit
from mindstream.backends.engine.sampler import SampleRow
from mindstream.backends.engine.scheduler import Scheduler, Step
from mindstream.backends.engine.sequence import Sequence
from mindstream.backends.engine.step_model import Chosen, Float32, StepModel, logits_of
from mindstream.plugin.backend import Limits
from mindstream.plugin.errors import Overloaded, RequestError
from mindstream.plugin.serving_config import ServingConfig

log = logging.getLogger(__name__)

Clock = Callable[[], float]


class Samples(Protocol):
    """What the loop needs of `sampler.Sampler`."""

    def sample(self, logits: Float32, rows: list[SampleRow]) -> list[int]: ...


class Engine:
    """Scheduler, model and sampler, wired up. In-process; `process.py` gives it a process."""

    def __init__(
        self,
        model: StepModel,
        limits: Limits,
        serving: ServingConfig,
        sampler: Samples,
        clock: Clock = time.monotonic,
        groups: int = 1,
    ) -> None:
        self.scheduler = Scheduler(limits, serving, groups)
        self._model = model
        self._sampler = sampler
        self._clock = clock
        self._batch_size = 0
        self._deltas: list[Delta] = []
        self._failures: list[Failure] = []

    @property
    def idle(self) -> bool:
        """`step` would do nothing."""
        return self.scheduler.idle

    def apply(self, command: Submit | Stop | Cancel) -> None:
        """A new request, or the end of one. Also while a step is under way, between its calls."""
        if isinstance(command, Cancel):
            self.scheduler.abort(command.key)
        elif isinstance(command, Stop):
            delta = self.scheduler.stop(command.key, self._clock())
            if delta is not None:
                self._deltas.append(delta)
        else:
            try:
                self.scheduler.add(command.key, command.request, command.submitted)
            except RequestError as error:
                self._failures.append(_failure(command.key, error))

    def step(self, receive: Callable[[], None] = lambda: None) -> None:
        """One step, if there is something to do. `receive` is called after the device has worked.

        A `forward` that raises ends the requests that were in the step, each with one error, and
        the engine carries on: the others' KV blocks are not touched by the failed step.
        """
        step = self.scheduler.schedule(self._clock())
        if step is not None:
            batch = step.batch
            self._land(step, lambda: self._model.forward(batch), receive)

    def _land(
        self,
        step: Step,
        forward: Callable[[], Float32 | Chosen],
        receive: Callable[[], None],
    ) -> None:
        """Everything about a step from the device's work on."""
        self._batch_size = step.size
        try:
            output = forward()
            _check_shape(output, step)
        except Exception as error:  # a device may raise anything; it becomes answers
            log.exception("a step of %d sequences failed", step.size)
            why = f"The model failed in a step of this request: {type(error).__name__}: {error}"
            for key in self.scheduler.discard(step, self._clock()):
                self._failures.append(Failure(key, "BackendFailed", why))
            return
        receive()
        if isinstance(output, Chosen):
            tokens = self._take(step, output)
        else:
            tokens = self._sample(step, output)
        self._deltas += self.scheduler.update(step, tokens, self._clock())

    def _take(self, step: Step, chosen: Chosen) -> list[int]:
        """A token for each row, without sampling; as `_sample`."""
        tokens: list[int] = chosen.ids.tolist()
        for row, token in enumerate(tokens):
            if token < 0:
                self._give_up(step.sampling[row], "a logit is NaN, or none is above -inf")
                tokens[row] = 0
        return tokens

    def _sample(self, step: Step, logits: Float32) -> list[int]:
        """A token for each row; 0 where the request has ended meanwhile."""
        alive = [row for row, sequence in enumerate(step.sampling) if not sequence.ended]
        tokens = [0] * len(step.sampling)
        if len(alive) < len(tokens):
            logits = logits[alive]
        rows = [_sample_row(step.sampling[row]) for row in alive]
        if not rows:
            return tokens
        try:
            chosen = self._sampler.sample(logits, rows)
        except ValueError:
            chosen = self._sample_singly([step.sampling[row] for row in alive], logits)
        for row, token in zip(alive, chosen, strict=True):
            tokens[row] = token
        return tokens

    def _sample_singly(self, sequences: list[Sequence], logits: Float32) -> list[int]:
        """Some row cannot be sampled: ends the requests of such rows alone."""
        tokens: list[int] = []
        for index, sequence in enumerate(sequences):
            try:
                rows = [_sample_row(sequence)]
                tokens += self._sampler.sample(logits[index : index + 1], rows)
            except ValueError as error:
                self._give_up(sequence, str(error))
                tokens.append(0)
        return tokens

    def _give_up(self, sequence: Sequence, reason: str) -> None:
        """Ends one request of a step that has no token for it, if it has not ended meanwhile."""
        if sequence.ended:
            return
        why = f"No token could be chosen: {reason}"
        log.error("%s: %s", sequence.request.request_id, why)
        self._failures.append(Failure(sequence.key, "BackendFailed", why))
        self.scheduler.abort(sequence.key)

    def report(self) -> Report:
        """Everything since the last report."""
        report = Report(self._batch_size, self._deltas, self._failures, self.scheduler.stats())
        self._batch_size, self._deltas, self._failures = 0, [], []
        return report


def _sample_row(sequence: Sequence) -> SampleRow:
    request = sequence.request
    return SampleRow(request.sampling, sequence.tokens, sequence.generated, request.eos_token_ids)


def _check_shape(output: Float32 | Chosen, step: Step) -> None:
    rows: object  # a model may return anything
    if isinstance(output, Chosen) and step.batch.greedy:
        rows, dimensions = output.ids, 1
    else:
        rows, dimensions = logits_of(output), 2
    wanted = len(step.sampling)
    if not isinstance(rows, np.ndarray) or rows.ndim != dimensions or len(rows) != wanted:
        found = getattr(rows, "shape", type(rows).__name__)
        raise TypeError(f"forward() gave {found}, expected {wanted} rows of logits")


def _failure(key: int, error: RequestError) -> Failure:
    retry_after = error.retry_after if isinstance(error, Overloaded) else 1
    return Failure(key, type(error).__name__, str(error), retry_after)
