"""A model that chooses the tokens of greedy batches itself: the same answers, the same failures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindstream.backends.engine.loop import Engine
from mindstream.backends.engine.messages import Failure, Submit
from mindstream.backends.engine.overlap import make_engine, make_model
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.step_model import Batch, Chosen, Float32
from mindstream.backends.engine.testing import GIVES_NAN, HashModel, reference_tokens
from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import GenerationRequest, SamplingParams

Make = Callable[..., Deployment]


class ChoosingModel:
    """`HashModel`, that hands out logits only where it must. `batches`: (rows, chosen) a step."""

    def __init__(self, deployment: Deployment) -> None:
        self._model = HashModel(deployment)
        self.batches: list[tuple[int, bool]] = []

    def load(self) -> Limits:
        return self._model.load()

    def forward(self, batch: Batch) -> Float32 | Chosen:
        logits = self._model.forward(batch)
        self.batches.append((len(logits), batch.greedy))
        if not batch.greedy:
            return logits
        best = [int(row.argmax()) if row.max() > -np.inf else -1 for row in logits]
        return Chosen(np.array(best, np.int32))

    def close(self) -> None:
        self._model.close()


def run(
    config: Deployment, requests: list[GenerationRequest], make: Callable[..., Any] = ChoosingModel
) -> tuple[dict[int, list[int]], list[Failure], Any, Engine]:
    """Tokens by request, failures, the model and the engine when all is done."""
    made: list[Any] = []

    def factory() -> Any:
        made.append(make(config))
        return made[0]

    model = make_model(factory, config.serving)
    engine = make_engine(model, model.load(), config.serving, Sampler(None))
    tokens: dict[int, list[int]] = {key: [] for key in range(len(requests))}
    failures: list[Failure] = []
    for key, wanted in enumerate(requests):
        engine.apply(Submit(key, wanted, 0.0))
    while not engine.idle:
        engine.step()
        engine.scheduler.check_integrity()
        report = engine.report()
        failures += report.failures
        for delta in report.deltas:
            tokens[delta.key].append(delta.token)
    model.close()
    return tokens, failures, made[0], engine


SAMPLING = st.one_of(
    st.builds(SamplingParams),
    st.builds(SamplingParams, do_sample=st.just(True), top_k=st.just(1)),
    st.builds(
        SamplingParams,
        do_sample=st.booleans(),
        temperature=st.sampled_from([0.0, 0.7]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        seed=st.integers(0, 99),
    ),
)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9), SAMPLING), min_size=1, max_size=6),
    st.integers(1, 8),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_request_gets_its_own_tokens(
    either_loop: Make, drawn: list[tuple[int, int, SamplingParams]], budget: int
) -> None:
    """Whichever of the requests beside it are greedy, and whether they end prompts or decode."""
    requests = [
        GenerationRequest("r", tuple(range(2, 2 + length)), new, sampling)
        for length, new, sampling in drawn
    ]
    config = either_loop(serving={"max_batched_tokens": budget})
    tokens, failures, model, _ = run(config, requests)
    assert not failures
    assert tokens == {i: reference_tokens(wanted) for i, wanted in enumerate(requests)}
    plain = [s.takes_largest for _, _, s in drawn]
    if all(plain):
        assert all(greedy for _, greedy in model.batches)
    if not any(plain):
        assert not any(greedy for rows, greedy in model.batches if rows)


def test_a_row_without_a_choice_ends_its_request_alone(either_loop: Make) -> None:
    good = GenerationRequest("r", (2,), 6)
    tokens, (failure,), _, engine = run(
        either_loop(), [good, GenerationRequest("r", (3, GIVES_NAN), 6)]
    )
    assert tokens == {0: reference_tokens(good), 1: []}
    assert failure.key == 1 and failure.message.startswith("No token could be chosen: a logit is")
    assert engine.scheduler.stats().free_blocks == 64


@pytest.mark.parametrize(
    ("sampling", "given_back", "expected"),
    [
        (SamplingParams(do_sample=True), Chosen(np.zeros(1, np.int32)), "that is not greedy"),
        (SamplingParams(), Chosen(np.zeros(2, np.int32)), r"gave \(2,\), expected 1 rows"),
        (SamplingParams(), Chosen(np.zeros((1, 1), np.int32)), r"gave \(1, 1\), expected 1 rows"),
        (SamplingParams(), np.zeros(1, np.float32), r"gave \(1,\), expected 1 rows"),
        (SamplingParams(), None, "gave NoneType, expected 1 rows"),
    ],
    ids=["not greedy", "too many", "two dimensions", "flat logits", "nothing"],
)
def test_what_a_model_may_not_give_back_is_an_error_of_the_step(
    either_loop: Make, sampling: SamplingParams, given_back: Any, expected: str
) -> None:
    class Model(HashModel):
        def forward(self, batch: Batch) -> Any:
            return given_back

    requests = [GenerationRequest("r", (2,), 6, sampling)]
    tokens, (failure,), _, engine = run(either_loop(), requests, Model)
    assert tokens == {0: []}
    assert re.search(expected, failure.message)
    assert engine.scheduler.stats().free_blocks == 64
