"""`serving.prefix_cache` is obeyed: by what is computed, by the counters and by the metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mindstream.backends.engine.messages import Submit
from mindstream.backends.engine.overlap import make_engine, make_model
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.step_model import Batch
from mindstream.backends.engine.testing import HashModel, reference_tokens
from mindstream.handlers.metrics import Metrics
from mindstream.plugin.model_config import Deployment, load_deployment
from mindstream.plugin.request import GenerationRequest, SamplingParams
from mindstream.plugin.service import ModelService, open_service

Make = Callable[..., Deployment]
BOTH_LOOPS = pytest.mark.parametrize("overlap", ["false", "true"], ids=["plain", "overlap"])


def rate(service: ModelService) -> float:
    """The hit rate as `GET /metrics` shows it."""
    families = text_string_to_metric_families(Metrics({"echo": service}).text().decode())
    found = {sample.name: sample.value for family in families for sample in family.samples}
    return found["npu_prefix_cache_hit_rate"]


async def rates_of_a_repeated_prompt(overlap: str, prefix_cache: str) -> list[float]:
    """After each of three equal requests of 40 tokens, in blocks of 16."""
    settings = {"overlap": overlap, "prefix_cache": prefix_cache}
    service = open_service(load_deployment("echo", settings))
    await service.start()
    rates = []
    try:
        for number in range(3):
            request = GenerationRequest(str(number), await service.encode("x" * 40), 100)
            async with service.stream(request, timeout=60, restart_at_token=True) as chunks:
                assert "".join([chunk.text async for chunk in chunks]) == "x" * 40
            rates.append(rate(service))
        status = service.status()
        assert status.prompt_tokens == 120
        assert (status.prefix_hit_tokens > 0) == (prefix_cache == "true")
    finally:
        await service.stop(drain=False)
    return rates


@BOTH_LOOPS
async def test_with_the_switch_off_the_hit_rate_stays_0(overlap: str) -> None:
    assert await rates_of_a_repeated_prompt(overlap, "false") == [0, 0, 0]


@BOTH_LOOPS
async def test_with_the_switch_on_a_repeated_prompt_hits(overlap: str) -> None:
    rates = await rates_of_a_repeated_prompt(overlap, "true")
    assert rates == pytest.approx([0, 32 / 80, 64 / 120])


class CountingModel(HashModel):
    """Remembers how many tokens it was made to compute."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        self.computed = 0

    def forward(self, batch: Batch) -> Any:
        self.computed += int(batch.q_seq_lens.sum())
        return super().forward(batch)


@pytest.mark.parametrize(
    ("prefix_cache", "expected"), [(False, [40, 40, 40]), (True, [40, 4, 4])], ids=["off", "on"]
)
def test_the_switch_decides_what_is_computed(
    either_loop: Make, prefix_cache: bool, expected: list[int]
) -> None:
    """Whatever the counters say. Blocks hold 4 tokens here; the last one is never shared."""
    deployment = either_loop(serving={"prefix_cache": prefix_cache})
    counting = CountingModel(deployment)
    model = make_model(lambda: counting, deployment.serving)
    engine = make_engine(model, model.load(), deployment.serving, Sampler(None))
    request = GenerationRequest("r", (5,) * 40, 1, SamplingParams(do_sample=True, seed=2))
    computed, answers = [], []
    for key in range(3):
        before = counting.computed
        engine.apply(Submit(key, request, float(key)))
        while not engine.idle:
            engine.step()
            answers += [delta.token for delta in engine.report().deltas]
        computed.append(counting.computed - before)
    model.close()
    assert computed == expected
    assert answers == reference_tokens(request) * 3
