"""The promise: a request's tokens depend on the request alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from mindstream.backends.engine.messages import Submit
from mindstream.backends.engine.overlap import make_engine, make_model
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.testing import VOCAB, HashModel, reference_tokens
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import GenerationRequest, SamplingParams

Make = Callable[..., Deployment]


def crowd(count: int) -> list[GenerationRequest]:
    """Requests of every sort; many begin alike."""
    rng = random.Random(7)
    requests = []
    for number in range(count):
        head = [3] * 12 if number % 3 else []
        prompt = head + rng.choices(range(2, VOCAB), k=rng.randint(1, 20))
        sampling = SamplingParams(
            do_sample=number % 4 != 0,
            temperature=rng.choice([0.5, 1.0, 2.0]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([0.8, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            seed=rng.randint(1, 2**64 - 1),
        )
        requests.append(
            GenerationRequest(
                str(number),
                tuple(prompt),
                rng.randint(1, 40),
                sampling,
                eos_token_ids=(0,),
                priority=rng.randint(1, 5),
            )
        )
    return requests


def run(deployment: Deployment, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    """Tokens of each request; one arrives a step."""
    model = make_model(lambda: HashModel(deployment), deployment.serving)
    engine = make_engine(model, model.load(), deployment.serving, Sampler(None))
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    coming = list(enumerate(requests))
    while coming or not engine.idle:
        if coming:
            key, request = coming.pop(0)
            engine.apply(Submit(key, request, float(key)))
        engine.step()
        report = engine.report()
        assert not report.failures
        for delta in report.deltas:
            answers[requests[delta.key].request_id].append(delta.token)
    model.close()
    return answers


SETTINGS = {
    "alone, one token of prompt a step": {"max_batch_size": 1, "max_batched_tokens": 1},
    "alone, whole prompts": {"max_batch_size": 1, "max_batched_tokens": 512},
    "together": {"max_batch_size": 64, "max_batched_tokens": 512},
    "together, small chunks": {"max_batch_size": 64, "max_batched_tokens": 70},
    "together, no prefix cache": {"max_batch_size": 64, "prefix_cache": False},
}


@pytest.mark.parametrize("num_blocks", [18, 400], ids=["preempting", "roomy"])
@pytest.mark.parametrize("serving", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_same_tokens_whatever_else_runs(
    either_loop: Make, serving: dict[str, Any], num_blocks: int
) -> None:
    requests = crowd(60)
    expected = {request.request_id: reference_tokens(request) for request in requests}
    options = {**serving, "priority_ageing": 3.0}
    answers = run(either_loop(serving=options, num_blocks=num_blocks), requests)
    assert answers == expected


def test_the_arrival_order_does_not_matter(either_loop: Make) -> None:
    requests = crowd(40)
    answers = run(either_loop(num_blocks=30), requests)
    assert run(either_loop(num_blocks=30), requests[::-1]) == answers


def test_an_interrupted_generation_goes_on_as_if_it_had_not_been(either_loop: Make) -> None:
    for request in crowd(20):
        whole = reference_tokens(request)
        done = len(whole) // 2
        if done == len(whole) or not done:
            continue
        rest = GenerationRequest(
            request.request_id,
            request.prompt_ids + tuple(whole[:done]),
            request.max_new_tokens,
            request.sampling,
            request.eos_token_ids,
            generated_before=done,
        )
        answers = run(either_loop(num_blocks=100), [rest])
        assert answers[request.request_id] == whole[done:]
