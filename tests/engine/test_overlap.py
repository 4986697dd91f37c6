"""What is the overlapping loop's own: several steps in flight, on two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindstream.backends.engine.messages import Submit
from mindstream.backends.engine.overlap import ModelThread, make_engine, make_model
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.scheduler import Scheduler, Step
from mindstream.backends.engine.step_model import Batch, Float32, logits_of
from mindstream.backends.engine.testing import RAISES, VOCAB, HashModel, reference_tokens
from mindstream.plugin.backend import Limits
from mindstream.plugin.errors import Overloaded, RequestRefused
from mindstream.plugin.model_config import Deployment, ServingConfig
from mindstream.plugin.request import GenerationRequest

Make = Callable[..., Deployment]
PATIENCE = 20.0  # seconds until a wait counts as a deadlock


def request(*prompt: int, new: int = 8, priority: int = 5) -> GenerationRequest:
    return GenerationRequest("r", prompt, new, priority=priority)


def test_the_device_computes_while_the_other_group_is_sampled(deployment: Make) -> None:
    """Step 3, the second group's, and the sampling of step 2 wait for each other."""
    computing, sampling = threading.Event(), threading.Event()
    steps: list[int] = []

    class Model(HashModel):
        def forward(self, batch: Batch) -> Float32:
            steps.append(len(batch.q_seq_lens))
            if len(steps) == 3:
                computing.set()
                assert sampling.wait(PATIENCE), "nothing is sampled beside the device"
            return super().forward(batch)

    class WatchedSampler(Sampler):
        def sample(self, logits: Float32, rows: Any) -> list[int]:
            if len(steps) > 1:
                sampling.set()
                assert computing.wait(PATIENCE), "the device is idle"
            return super().sample(logits, rows)

    config = deployment(serving={"overlap": True})
    model = make_model(lambda: Model(config), config.serving)
    engine = make_engine(model, model.load(), config.serving, WatchedSampler(None))
    requests = [request(2, 3), request(4, 5)]
    for key, wanted in enumerate(requests):
        engine.apply(Submit(key, wanted, 0.0))
    answers: list[list[int]] = [[], []]
    while not engine.idle:
        engine.step()
        for delta in engine.report().deltas:
            answers[delta.key].append(delta.token)
    model.close()
    assert answers == [reference_tokens(wanted) for wanted in requests]
    assert steps == [2] + [1] * 14


@pytest.mark.parametrize("overlap", [False, True])
def test_one_thread_makes_every_call_of_the_model(deployment: Make, overlap: bool) -> None:
    threads: list[threading.Thread] = []

    class Model(HashModel):
        def __init__(self, deployment: Deployment) -> None:
            threads.append(threading.current_thread())
            super().__init__(deployment)

        def load(self) -> Limits:
            threads.append(threading.current_thread())
            return super().load()

        def forward(self, batch: Batch) -> Float32:
            threads.append(threading.current_thread())
            return super().forward(batch)

        def close(self) -> None:
            threads.append(threading.current_thread())

    config = deployment(serving={"overlap": overlap})
    model = make_model(lambda: Model(config), config.serving)
    engine = make_engine(model, model.load(), config.serving, Sampler(None))
    engine.apply(Submit(1, request(2, 3), 0.0))
    while not engine.idle:
        engine.step()
    model.close()
    model.close()
    assert len(threads) >= 4 and len(set(threads)) == 1
    assert (threads[0] is threading.current_thread()) is not overlap
    assert not overlap or not threads[0].is_alive()


def test_close_waits_for_the_step_under_way_and_drops_the_queued_one(deployment: Make) -> None:
    began, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    class Model(HashModel):
        def forward(self, batch: Batch) -> Float32:
            calls.append("forward")
            began.set()
            assert go_on.wait(PATIENCE)
            return super().forward(batch)

        def close(self) -> None:
            calls.append("close")

    model = ModelThread(lambda: Model(deployment()))
    model.load()
    zero = np.zeros(1, np.int32)
    batch = Batch(zero + 2, zero, zero, zero + 1, zero, zero.reshape(1, 1), zero)
    first, second = model.begin(batch), model.begin(batch)
    assert began.wait(PATIENCE)
    threading.Timer(0.05, go_on.set).start()
    model.close()
    assert calls == ["forward", "close"]
    assert logits_of(first.result()).shape == (1, VOCAB)
    assert second.cancelled()


def test_a_failed_step_leaves_the_other_one_in_flight_alone(deployment: Make) -> None:
    config = deployment(serving={"overlap": True})
    model = make_model(lambda: HashModel(config), config.serving)
    engine = make_engine(model, model.load(), config.serving, Sampler(None))
    requests = [request(key + 2, new=20) for key in range(4)]
    for key, wanted in enumerate(requests):
        engine.apply(Submit(key, wanted, 0.0))
    engine.step()
    engine.step()  # now two groups are under way
    engine.apply(Submit(9, request(5, RAISES), 0.0))
    tokens: dict[int, list[int]] = {key: [] for key in range(4)}
    failed: set[int] = set()
    engine_reports = [engine.report()]
    while not engine.idle:
        engine.step()
        engine.scheduler.check_integrity()
        engine_reports.append(engine.report())
    model.close()
    for report in engine_reports:
        failed |= {failure.key for failure in report.failures}
        for delta in report.deltas:
            tokens[delta.key].append(delta.token)
    assert 9 in failed
    whole = [key for key in range(4) if key not in failed]
    assert len(whole) == 2
    assert all(tokens[key] == reference_tokens(requests[key]) for key in whole)
    assert engine.scheduler.stats().free_blocks == 64


actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.integers(1, 20), st.integers(1, 12), st.integers(1, 5)
        ),  # prompt, new tokens, priority
        st.tuples(st.sampled_from(["schedule", "schedule", "land", "land", "fail"])),
        st.tuples(st.sampled_from(["abort", "stop"]), st.integers(0, 30)),
    ),
    max_size=80,
)


class Flights:
    """Steps in flight, with what must hold between them."""

    def __init__(self, scheduler: Scheduler, groups: int) -> None:
        self.scheduler = scheduler
        self.groups = groups
        self.steps: list[Step] = []
        self.now = 0.0
        self.alive: set[int] = set()

    def schedule(self) -> bool:
        step = self.scheduler.schedule(self.now) if len(self.steps) < self.groups else None
        if step is None:
            return False
        for other in self.steps:
            assert not set(map(id, step.members())) & set(map(id, other.members()))
            # Nobody writes into a block that another step in flight reads or writes.
            written = set((step.batch.slot_mapping // 2).tolist())
            assert not written & set(other.batch.block_tables.ravel().tolist())
        assert all(not sequence.ended for sequence in step.members())
        self.steps.append(step)
        return True

    def land(self, *, fail: bool = False) -> None:
        if not self.steps:
            return
        step = self.steps.pop(0)
        if fail:
            keys = self.scheduler.discard(step, self.now)
            self.end(*keys)
            return
        for delta in self.scheduler.update(step, [3] * len(step.sampling), self.now):
            assert delta.key in self.alive
            if delta.finish:
                self.end(delta.key)

    def end(self, *keys: int) -> None:
        assert set(keys) <= self.alive, "it ended twice"
        self.alive -= set(keys)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=actions,
    groups=st.integers(1, 3),
    slots=st.integers(1, 6),
    budget=st.integers(1, 16),
    blocks=st.integers(2, 20),
)
def test_steps_in_flight_share_no_sequence_and_write_into_no_block_of_each_other(
    script: list[tuple[Any, ...]], groups: int, slots: int, budget: int, blocks: int
) -> None:
    serving = ServingConfig(max_batch_size=slots, max_batched_tokens=budget, priority_ageing=5.0)
    scheduler = Scheduler(Limits(VOCAB, 64, 64, 2, blocks), serving, groups)
    flights = Flights(scheduler, groups)
    for key, (what, *numbers) in enumerate(script):
        flights.now += 1.0
        if what == "add":
            prompt, new, priority = numbers
            try:
                scheduler.add(
                    key, request(*([4] * prompt), new=new, priority=priority), flights.now
                )
            except (Overloaded, RequestRefused):
                continue
            flights.alive.add(key)
        elif what == "schedule":
            flights.schedule()
        elif what in ("land", "fail"):
            flights.land(fail=what == "fail")
        elif flights.alive:
            key = sorted(flights.alive)[numbers[0] % len(flights.alive)]
            flights.end(key)
            assert scheduler.abort(key) if what == "abort" else scheduler.stop(key, flights.now)
        scheduler.check_integrity()
    for _ in range(5_000):
        if not flights.steps and not flights.alive:
            break
        flights.now += 1.0
        while flights.schedule():
            pass
        flights.land()
        scheduler.check_integrity()
    assert not flights.alive and scheduler.idle
    stats = scheduler.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (blocks, 0, 0)


def test_groups_are_even_and_nobody_is_left_out(deployment: Make) -> None:
    serving = ServingConfig(max_batch_size=16, max_batched_tokens=64)
    scheduler = Scheduler(Limits(VOCAB, 64, 64, 4, 200), serving, 2)
    for key in range(9):
        scheduler.add(key, request(key + 2, new=30), 0.0)
    steps = [scheduler.schedule(0.0)]
    sizes = []
    for _ in range(12):
        step = steps.pop(0)
        assert step is not None
        scheduler.update(step, [3] * len(step.sampling), 0.0)
        while len(steps) < 2 and (following := scheduler.schedule(0.0)) is not None:
            steps.append(following)
            sizes.append(following.size)
    assert sizes[:6] == [5, 4, 5, 4, 5, 4]
