"""The demo model behind the real engine: how a prompt was cut and cached changes no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mindstream.backends.engine.loop import Engine
from mindstream.backends.engine.messages import Submit
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.step_model import Batch
from mindstream.backends.mindspore.cpu.library import library_path
from mindstream.plugin.backend import Limits
from mindstream.plugin.request import GenerationRequest, SamplingParams
from mindstream.plugin.serving_config import ServingConfig

pytestmark = pytest.mark.model
NEW = 12


class Remote:
    """The StepModel in a worker; remembers the most rows a step had."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.largest = 0

    def load(self) -> Limits:
        limits: Limits = self._worker.limits
        return limits

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        self.largest = max(self.largest, len(batch.token_ids))
        logits: NDArray[np.float32] = self._worker.forward(batch)
        return logits

    def close(self) -> None:
        """The worker lives on."""


@pytest.fixture(scope="module")
def served(start_worker: Callable[..., Any]) -> Iterator[Any]:
    """As it is served by default; MindSpore's own operators would promise no equal bits."""
    if library_path() is None:
        pytest.skip("the kernels are not built")
    worker = start_worker()
    yield worker.load("smollm2-135m")
    worker.close()


def requests() -> list[GenerationRequest]:
    """Lengths around blocks and chunks; all but the first begin alike; one is greedy."""
    rng = np.random.default_rng(11)
    head = rng.integers(0, 40_000, 100).tolist()
    prompts = [rng.integers(0, 40_000, 33).tolist()]
    prompts += [head[:size] + rng.integers(0, 40_000, 20).tolist() for size in (100, 96, 64, 17)]
    return [
        GenerationRequest(
            str(number),
            tuple(prompt),
            NEW,
            SamplingParams(do_sample=number != 2, temperature=1.0, seed=number + 1),
        )
        for number, prompt in enumerate(prompts)
    ]


def run(worker: Any, *, rounds: int = 1, **serving: Any) -> tuple[list[list[int]], int, int]:
    """Tokens of each request of each round, prefix-cache hits, and the most rows of a step."""
    model = Remote(worker)
    engine = Engine(model, model.load(), ServingConfig(**serving), Sampler(None))
    wanted = requests() * rounds
    answers: list[list[int]] = [[] for _ in wanted]
    hits = 0
    for begin in range(0, len(wanted), len(requests())):
        for key in range(begin, begin + len(requests())):
            engine.apply(Submit(key, wanted[key], 0.0))
        while not engine.idle:
            engine.step()
            report = engine.report()
            assert not report.failures
            for delta in report.deltas:
                answers[delta.key].append(delta.token)
            hits = report.stats.prefix_hit_tokens
    return answers, hits, model.largest


@pytest.fixture(scope="module")
def plain(served: Any) -> list[list[int]]:
    """Whole prompts, nothing shared."""
    tokens, hits, largest = run(served, max_batched_tokens=2048, prefix_cache=False)
    assert (hits, largest) == (0, sum(len(request.prompt_ids) for request in requests()))
    assert all(len(row) == NEW for row in tokens)
    return tokens


def test_a_prefix_from_the_cache_gives_the_tokens_of_a_computed_one(
    served: Any, plain: list[list[int]]
) -> None:
    tokens, hits, _ = run(served, rounds=2, max_batched_tokens=2048, prefix_cache=True)
    assert hits > 300
    assert tokens == plain * 2


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["computed", "cached"])
@pytest.mark.parametrize("budget", [9, 70])
def test_small_chunks_give_the_tokens_of_whole_prompts(
    served: Any, plain: list[list[int]], budget: int, prefix_cache: bool
) -> None:
    """Five sequences decode beside chunks of a few tokens."""
    tokens, hits, largest = run(
        served, rounds=2, max_batched_tokens=budget, prefix_cache=prefix_cache
    )
    assert largest <= budget
    assert (hits > 0) == prefix_cache
    assert tokens == plain * 2


def test_the_seed_decides(served: Any, plain: list[list[int]]) -> None:
    """Else that tokens are equal would say little."""
    first, again = requests()[1], requests()[1]
    other = GenerationRequest(
        "o", first.prompt_ids, NEW, SamplingParams(do_sample=True, temperature=1.0, seed=99)
    )
    model = Remote(served)
    engine = Engine(model, model.load(), ServingConfig(), Sampler(None))
    answers: list[list[int]] = [[], []]
    for key, request in enumerate((again, other)):
        engine.apply(Submit(key, request, 0.0))
    while not engine.idle:
        engine.step()
        for delta in engine.report().deltas:
            answers[delta.key].append(delta.token)
    assert answers[0] == plain[1]
    assert answers[1] != plain[1]
