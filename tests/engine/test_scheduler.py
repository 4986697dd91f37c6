"""The engine without a process, under random load: whatever comes, the invariants hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindstream.backends.engine.messages import EOS, LENGTH, STOP, Cancel, Failure, Stop, Submit
from mindstream.backends.engine.overlap import make_engine, make_model
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.step_model import Batch, Float32
from mindstream.backends.engine.testing import RAISES, VOCAB, HashModel, reference_tokens
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import GenerationRequest, SamplingParams

Make = Callable[..., Deployment]


def request(
    prompt: list[int],
    new: int = 4,
    *,
    priority: int = 5,
    seed: int = 1,
    salt: str = "",
    eos: tuple[int, ...] = (),
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt_ids=tuple(prompt),
        max_new_tokens=new,
        sampling=SamplingParams(do_sample=seed % 2 == 0, seed=seed),
        eos_token_ids=eos,
        priority=priority,
        cache_salt=salt,
    )


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    first_step: int = 0
    queue_waits: list[int] = field(default_factory=list)


class CheckedModel(HashModel):
    """HashModel that also notes batches which break the contract of `Batch`."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self.budget = deployment.serving.max_batched_tokens
        self.rows = 0
        self.faults: list[str] = []

    def forward(self, batch: Batch) -> Float32:
        rows = self.rows = len(batch.token_ids)
        if not (0 < rows <= self.budget and rows == batch.q_seq_lens.sum()):
            self.faults.append(f"{rows} rows, budget {self.budget}")
        if len(set(batch.slot_mapping.tolist())) != rows:
            self.faults.append("two rows write to one slot")
        try:
            return super().forward(batch)
        except Exception as error:
            if RAISES not in batch.token_ids:
                self.faults.append(repr(error))
            raise


class Simulation:
    """An engine, a clock that ticks a second a step, and what came out."""

    def __init__(self, deployment: Deployment) -> None:
        self.now = 0.0
        self.steps = 0
        self.model = CheckedModel(deployment)
        self.served = make_model(lambda: self.model, deployment.serving)
        self.engine = make_engine(
            self.served,
            self.served.load(),
            deployment.serving,
            Sampler(None),
            clock=lambda: self.now,
        )
        self.requests: dict[int, GenerationRequest] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.failures: list[Failure] = []

    def submit(self, wanted: GenerationRequest) -> int:
        key = len(self.requests) + 1
        self.requests[key], self.outcomes[key] = wanted, Outcome()
        self.engine.apply(Submit(key, wanted, self.now))
        self.collect()
        return key

    def cancel(self, key: int) -> None:
        if not self.outcomes[key].ends:
            self.outcomes[key].ends.append("cancelled")
        self.engine.apply(Cancel(key))

    def stop(self, key: int) -> None:
        self.engine.apply(Stop(key))

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.engine.step(meanwhile)
        self.engine.scheduler.check_integrity()
        self.now += 1.0
        self.steps += 1
        self.collect()

    def collect(self) -> None:
        report = self.engine.report()
        self.failures += report.failures
        for delta in report.deltas:
            outcome = self.outcomes[delta.key]
            if "cancelled" in outcome.ends:
                continue  # nobody listens
            assert not outcome.ends, "a token after the end"
            outcome.first_step = outcome.first_step or self.steps
            outcome.queue_waits.append(delta.queue_wait_us)
            if delta.token >= 0:
                outcome.tokens.append(delta.token)
            assert delta.generated == len(outcome.tokens)
            if delta.finish:
                outcome.ends.append({EOS: "eos", STOP: "stop", LENGTH: "length"}[delta.finish])
        for failure in report.failures:
            self.outcomes[failure.key].ends.append(failure.kind)

    def finish(self, limit: int = 20_000) -> None:
        while not self.engine.idle:
            assert self.steps < limit, "the engine does not get done"
            self.step()
        self.step()

    def check(self) -> None:
        """Everyone ended once, with the reference's tokens; all memory is free."""
        self.served.close()
        assert self.model.faults == []
        for key, outcome in self.outcomes.items():
            assert len(outcome.ends) == 1, (key, outcome)
            if RAISES in self.requests[key].prompt_ids:
                continue
            expected = reference_tokens(self.requests[key])
            assert outcome.tokens == expected[: len(outcome.tokens)]
            if outcome.ends[0] in ("eos", "length"):
                assert outcome.tokens == expected
        stats = self.engine.scheduler.stats()
        assert stats.free_blocks == self.model.config.num_blocks
        assert (stats.running, stats.waiting) == (0, 0)


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30) | st.builds(
    lambda head, tail: [7] * head + tail,  # beginnings that can be shared
    st.integers(1, 20),
    st.lists(st.integers(0, 2), max_size=4),
)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it comes
        st.builds(
            request,
            prompts,
            st.integers(1, 12),
            priority=st.integers(1, 5),
            seed=st.integers(1, 9),
            salt=st.sampled_from(["", "", "a"]),
            eos=st.just((0, 1)),
        ),
        st.sampled_from(["run", "run", "run", "cancel", "stop", "raise"]),
        st.integers(0, 6),  # steps until its cancel or stop
    ),
    max_size=25,
)
shapes = st.fixed_dictionaries(
    {
        "serving": st.fixed_dictionaries(
            {
                "max_batch_size": st.integers(1, 6),
                "max_batched_tokens": st.integers(1, 24),
                "max_waiting": st.integers(0, 30),
                "prefix_cache": st.booleans(),
                "priority_ageing": st.sampled_from([0.5, 10.0]),
            }
        ),
        "num_blocks": st.integers(2, 24),
        "block_size": st.integers(1, 5),
    }
)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(shape=shapes, load=arrivals)
def test_any_load_ends_every_request_once_with_the_reference_tokens(
    either_loop: Make, shape: dict[str, Any], load: list[tuple[int, GenerationRequest, str, int]]
) -> None:
    simulation = Simulation(either_loop(**shape))
    later: list[tuple[int, Callable[[int], None], int]] = []

    def act() -> None:
        for moment, action, key in list(later):
            if moment <= simulation.steps:
                later.remove((moment, action, key))
                action(key)

    for pause, wanted, fate, patience in load:
        for _ in range(pause):
            act()
            simulation.step(act)
        if fate == "raise":
            wanted = replace(wanted, prompt_ids=(*wanted.prompt_ids, RAISES))
        key = simulation.submit(wanted)
        if fate in ("cancel", "stop"):
            action = simulation.cancel if fate == "cancel" else simulation.stop
            later.append((simulation.steps + patience, action, key))
    while later or not simulation.engine.idle:
        act()
        simulation.step(act)
    simulation.finish()
    simulation.check()


def test_thousands_of_random_requests(either_loop: Make) -> None:
    rng = random.Random(20260101)
    simulation = Simulation(
        either_loop(
            serving={"max_batch_size": 16, "max_batched_tokens": 40, "max_waiting": 200},
            num_blocks=40,
            block_size=4,
        )
    )
    alive: list[int] = []
    while len(simulation.requests) < 3000:
        for _ in range(rng.randrange(3)):
            prompt = [7] * rng.choice([0, 8, 20]) + rng.choices(
                range(2, VOCAB), k=rng.randint(1, 9)
            )
            if rng.random() < 0.01:
                prompt.append(RAISES)
            wanted = request(
                prompt,
                rng.randint(1, 20),
                priority=rng.randint(1, 5),
                seed=rng.randint(1, 99),
                eos=(0, 1),
            )
            alive.append(simulation.submit(wanted))

        def meanwhile() -> None:
            if alive and rng.random() < 0.2:
                key = alive.pop(rng.randrange(len(alive)))
                rng.choice([simulation.cancel, simulation.stop])(key)

        meanwhile()
        simulation.step(meanwhile)
    simulation.finish()
    simulation.check()
    ends = [outcome.ends[0] for outcome in simulation.outcomes.values()]
    assert {"eos", "length", "stop", "cancelled", "BackendFailed"} <= set(ends)
    stats = simulation.engine.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0


def test_a_long_prompt_stalls_nobody(either_loop: Make) -> None:
    simulation = Simulation(
        either_loop(serving={"max_batched_tokens": 8}, num_blocks=200, block_size=4)
    )
    streaming = simulation.submit(request([5, 6], 60, seed=3))
    simulation.step()
    long = simulation.submit(request([9] * 200, 1))
    steps = simulation.steps
    while not simulation.outcomes[long].tokens:
        before = len(simulation.outcomes[streaming].tokens)
        simulation.step()
        assert len(simulation.outcomes[streaming].tokens) == before + 1
    assert simulation.steps - steps == -(-200 // 7)  # 7 of the 8 tokens a step were the prompt's


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(either_loop: Make) -> None:
    simulation = Simulation(
        either_loop(serving={"max_batched_tokens": 16}, num_blocks=200, block_size=4)
    )
    long = simulation.submit(request([9] * 500, 1))
    simulation.step()
    short = simulation.submit(request([2, 3, 4], 1))
    simulation.step()
    assert simulation.outcomes[short].ends
    assert simulation.model.rows == 16  # and the long one got all the rest
    simulation.finish()
    assert simulation.outcomes[long].first_step == -(-503 // 16)


def test_several_prompts_share_one_step(either_loop: Make) -> None:
    simulation = Simulation(either_loop(serving={"max_batched_tokens": 64}))
    for prompt in ([2, 3, 4], [5], [6, 7, 8, 9, 10]):
        simulation.submit(request(prompt))
    simulation.step()
    assert all(len(outcome.tokens) == 1 for outcome in simulation.outcomes.values())


def test_first_come_first_served_within_a_priority_and_1_first(either_loop: Make) -> None:
    simulation = Simulation(either_loop(serving={"max_batch_size": 1}))
    order = [simulation.submit(request([2], 2, priority=p)) for p in (5, 3, 3, 1)]
    simulation.finish()
    first, third, fourth, urgent = (simulation.outcomes[key].first_step for key in order)
    assert urgent < third < fourth < first


def test_priority_5_is_not_starved_by_a_steady_stream_of_priority_1(either_loop: Make) -> None:
    ageing = 10.0
    simulation = Simulation(
        either_loop(serving={"max_batch_size": 1, "priority_ageing": ageing, "max_waiting": 10**6})
    )
    patient = simulation.submit(request([3], 1, priority=5))
    while not simulation.outcomes[patient].ends:
        simulation.submit(request([2, 4], 1, priority=1))
        simulation.step()
        # The clock ticks a second a step: nobody who came 4 * ageing later may overtake.
        assert simulation.steps <= 4 * ageing + 2


def test_an_urgent_request_makes_a_less_important_one_give_way(either_loop: Make) -> None:
    simulation = Simulation(either_loop(serving={"max_batch_size": 2}))
    older = simulation.submit(request([2, 5], 30, priority=5, seed=2))
    newer = simulation.submit(request([2, 6], 30, priority=5, seed=4))
    simulation.step()
    simulation.now += 0.5
    urgent = simulation.submit(request([2, 7], 1, priority=1))
    before = len(simulation.outcomes[newer].tokens)
    simulation.step()
    assert simulation.outcomes[urgent].ends
    assert len(simulation.outcomes[newer].tokens) == before
    assert len(simulation.outcomes[older].tokens) == before + 1
    simulation.finish()
    simulation.check()


def test_out_of_blocks_the_newest_waits_and_nothing_is_lost(either_loop: Make) -> None:
    simulation = Simulation(either_loop(num_blocks=9, block_size=2, serving={"max_batch_size": 4}))
    for prompt in ([2, 3], [4, 5], [6, 7]):
        simulation.submit(request(prompt, 12, seed=6))
    simulation.finish()
    simulation.check()
    assert simulation.engine.scheduler.stats().preemptions > 0


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(either_loop: Make) -> None:
    simulation = Simulation(either_loop(num_blocks=3, block_size=4, max_seq_len=100))
    key = simulation.submit(request([2] * 10, 4))
    fits = simulation.submit(request([2] * 10, 3))  # the last token needs no place
    failures = simulation.failures
    assert [(f.key, f.kind) for f in failures] == [(key, "RequestRefused")]
    assert "10 tokens" in failures[0].message
    assert "4 KV-cache blocks of 4 tokens; the cache has 3" in failures[0].message
    simulation.finish()
    assert simulation.outcomes[fits].ends


def test_longer_than_max_seq_len_is_refused(either_loop: Make) -> None:
    simulation = Simulation(either_loop(max_seq_len=10))
    simulation.submit(request([2] * 8, 3))
    failure = simulation.failures[0]
    assert failure.kind == "RequestRefused"
    assert "max_seq_len 10" in failure.message


def test_beyond_the_waiting_limit_a_request_is_refused_at_once(either_loop: Make) -> None:
    simulation = Simulation(either_loop(serving={"max_batch_size": 1, "max_waiting": 2}))
    for _ in range(4):
        simulation.submit(request([2], 5))
    failures = simulation.failures
    assert [(f.key, f.kind) for f in failures] == [(4, "Overloaded")]
    assert "serving.max_waiting is 2" in failures[0].message


def test_with_blocks_short_the_waiting_limit_counts_those_that_really_wait(
    either_loop: Make,
) -> None:
    simulation = Simulation(
        either_loop(num_blocks=4, block_size=4, serving={"max_batch_size": 8, "max_waiting": 1})
    )
    for i in range(2):
        simulation.submit(request([3, 4, 5, i + 2] * 3, 2, seed=3))
    simulation.step()  # one runs, one waits: seven free slots are of no use
    simulation.submit(request([9, 9], 1))
    assert [f.kind for f in simulation.failures] == ["Overloaded"]
    simulation.step(lambda: simulation.cancel(2))  # and the first one ends
    assert simulation.engine.idle
    assert simulation.engine.scheduler.capacity == 9  # no later report would correct it
    simulation.check()


@pytest.mark.parametrize("when", ["waiting", "prefilling", "running", "in flight"])
@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_cancel_or_stop_frees_the_blocks_by_the_next_step(
    either_loop: Make, when: str, how: str
) -> None:
    simulation = Simulation(either_loop(serving={"max_batched_tokens": 4}))
    key = simulation.submit(request([2] * (9 if when == "prefilling" else 3), 50, seed=3))
    end = getattr(simulation, how)
    if when != "waiting":
        simulation.step(lambda: end(key) if when == "in flight" else None)
    if when != "in flight":
        end(key)
    assert simulation.engine.scheduler.stats().free_blocks == 64
    simulation.step()
    assert simulation.engine.idle
    assert simulation.outcomes[key].ends == ["cancelled" if how == "cancel" else "stop"]


def test_a_failed_step_ends_its_requests_with_one_error_each_and_no_others(
    either_loop: Make,
) -> None:
    simulation = Simulation(either_loop(serving={"max_batched_tokens": 4, "max_batch_size": 2}))
    broken = simulation.submit(request([2, RAISES, 3], 5))
    bystander = simulation.submit(request([2], 5))
    waiting = simulation.submit(request([4, 5], 5, seed=3))
    simulation.finish()
    assert simulation.outcomes[broken].ends == ["BackendFailed"]
    assert simulation.outcomes[bystander].ends == ["BackendFailed"]
    assert simulation.outcomes[waiting].ends == ["length"]
    simulation.check()


def test_a_failed_steps_blocks_are_not_shared(either_loop: Make) -> None:
    simulation = Simulation(either_loop(serving={"max_batched_tokens": 8}))
    simulation.submit(request([3] * 8 + [RAISES], 1))
    simulation.submit(request([3] * 7 + [RAISES], 1))
    simulation.finish()
    again = simulation.submit(request([3] * 9, 3))
    simulation.finish()
    assert simulation.outcomes[again].tokens == reference_tokens(simulation.requests[again])


def test_queue_wait_is_the_time_until_the_step_began(either_loop: Make) -> None:
    simulation = Simulation(either_loop(serving={"max_batch_size": 1}))
    simulation.submit(request([2], 3, seed=3))
    key = simulation.submit(request([4, 5], 2, seed=3))
    simulation.finish()
    waits = simulation.outcomes[key].queue_waits
    assert waits[0] == (simulation.outcomes[key].first_step - 1) * 1_000_000
    assert waits[1] == 1_000_000  # the clock ticks between two steps


def test_prefix_blocks_are_shared_only_within_a_salt(either_loop: Make) -> None:
    simulation = Simulation(either_loop())

    def hits(salt: str) -> int:
        before = simulation.engine.scheduler.stats().prefix_hit_tokens
        simulation.submit(request([3] * 13, 1, salt=salt))
        simulation.finish()
        return simulation.engine.scheduler.stats().prefix_hit_tokens - before

    assert [hits(""), hits("adapter"), hits(""), hits("adapter")] == [0, 0, 12, 12]


def test_a_model_that_gives_the_wrong_shape_is_an_error_of_the_step(
    either_loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(either_loop())
    wrong = np.zeros((7, VOCAB), np.float32)
    monkeypatch.setattr(simulation.model, "forward", lambda batch: wrong)
    simulation.submit(request([2], 3))
    simulation.step()
    failures = simulation.failures
    assert "expected 1 rows of logits" in failures[0].message


def test_the_sampler_reads_the_very_array_that_the_model_gave(
    either_loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(either_loop())
    forward, sample = simulation.model.forward, Sampler.sample
    given: list[Float32] = []
    shared: list[bool] = []

    def noted(batch: Batch) -> Float32:
        given.append(forward(batch))
        return given[-1]

    def watched(self: Sampler, logits: Float32, rows: Any) -> list[int]:
        shared.append(any(np.shares_memory(logits, array) for array in given))
        return sample(self, logits, rows)

    monkeypatch.setattr(simulation.model, "forward", noted)
    monkeypatch.setattr(Sampler, "sample", watched)
    for prompt in ([2, 3], [4], [5, 6, 7]):
        simulation.submit(request(prompt, 4))
    simulation.finish()
    assert shared and all(shared)
