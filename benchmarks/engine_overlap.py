"""When `serving.overlap` is worth it: both engine loops in one run, on the same requests.

    python benchmarks/engine_overlap.py                       # scripted devices, about a minute
    python benchmarks/engine_overlap.py --model smollm2-135m  # and a real one

A scripted device sleeps for its step's time and answers with logits over 49,152 tokens, so that the
sampler works as hard as with a real model and the device takes no core. The loops take turns, share
one loaded model, and must give the same tokens: a difference is an error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from mindstream.backends.engine.loop import Engine
from mindstream.backends.engine.messages import Submit
from mindstream.backends.engine.overlap import ModelThread, OverlapEngine
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.step_model import Batch, Float32
from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import Deployment, load_deployment
from mindstream.plugin.request import GenerationRequest, SamplingParams
from mindstream.plugin.serving_config import ServingConfig

_VOCAB = 49_152
_MODEL = "mindstream.backends.mindspore.step_model:MindSporeStepModel"


@dataclass(frozen=True, slots=True)
class Device:
    """Milliseconds of a step: `step` in any case, `row` more for each sequence."""

    step: float
    row: float

    def __str__(self) -> str:
        return f"{self.step:g} ms a step + {self.row:g} ms a sequence"


DEVICES = [Device(20, 0), Device(5, 0), Device(2, 0.5), Device(1, 0)]


class ScriptedModel:
    """A StepModel that keeps no cache: a row's logits depend on its last token and its place."""

    def __init__(self, device: Device) -> None:
        self._device = device
        rng = np.random.default_rng(1)
        self._logits: Float32 = (rng.standard_normal((64, _VOCAB)) * 3).astype(np.float32)

    def load(self) -> Limits:
        """See `StepModel.load`."""
        return Limits(_VOCAB, 4096, 256, 16, 4096)

    def forward(self, batch: Batch) -> Float32:
        """See `StepModel.forward`."""
        device = self._device
        time.sleep((device.step + device.row * len(batch.q_seq_lens)) / 1e3)
        rows = batch.logits_rows
        return self._logits[(batch.token_ids[rows] + batch.positions[rows]) % 64]

    def close(self) -> None:
        """See `StepModel.close`."""


def requests_of(streams: int, new: int) -> list[GenerationRequest]:
    """Sampled with top_p; prompts of 30 tokens."""
    rng = random.Random(streams)
    return [
        GenerationRequest(
            str(key),
            tuple(rng.randrange(3, 40_000) for _ in range(30)),
            new,
            SamplingParams(do_sample=True, top_p=0.9, seed=key + 1),
        )
        for key in range(streams)
    ]


def drive(engine: Engine, requests: list[GenerationRequest]) -> tuple[list[list[int]], float]:
    """Everything at once; tokens of each, and tokens a second. Raises RuntimeError."""
    answers: list[list[int]] = [[] for _ in requests]
    began = time.perf_counter()
    for key, request in enumerate(requests):
        engine.apply(Submit(key, request, time.monotonic()))
    while not engine.idle:
        engine.step()
        report = engine.report()
        if report.failures:
            raise RuntimeError(report.failures[0].message)
        for delta in report.deltas:
            answers[delta.key].append(delta.token)
    return answers, sum(map(len, answers)) / (time.perf_counter() - began)


def compare(
    model: ModelThread, limits: Limits, serving: ServingConfig, streams: int, options: Options
) -> dict[str, float]:
    """Medians of both loops' tokens a second over the rounds, which take turns."""
    requests = requests_of(streams, options.tokens)
    rates: dict[type[Engine], list[float]] = {Engine: [], OverlapEngine: []}
    given: list[list[int]] | None = None
    for _ in range(options.rounds):
        for loop in (Engine, OverlapEngine):
            answers, rate = drive(loop(model, limits, serving, Sampler(None)), requests)
            if given is not None and answers != given:
                raise RuntimeError("the loops gave different tokens")
            given = answers
            rates[loop].append(rate)
    plain, overlap = median(rates[Engine]), median(rates[OverlapEngine])
    return {"plain": plain, "overlap": overlap, "ratio": overlap / plain}


@dataclass(frozen=True, slots=True)
class Options:
    """How long to measure."""

    tokens: int
    rounds: int


def measure(
    name: str, model: ModelThread, serving: ServingConfig, options: Options
) -> dict[str, dict[str, float]]:
    """All numbers of streams over one model, printed as they come."""
    limits = model.load()
    results: dict[str, dict[str, float]] = {}
    for streams in (8, 32):
        figures = compare(model, limits, serving, streams, options)
        results[f"{name}, {streams} streams"] = figures
        print(
            f"{name:36} {streams:3} streams: plain {figures['plain']:7.0f} tokens/s, "
            f"overlap {figures['overlap']:7.0f}, ratio {figures['ratio']:.2f}",
            flush=True,
        )
    model.close()
    return results


def real_model(deployment: Deployment) -> ModelThread:
    """The deployment's model, on its thread, not yet loaded."""
    module, _, attribute = _MODEL.partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    return ModelThread(lambda: factory(deployment))


def main() -> None:
    """Prints a line for each device and number of streams."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="a deployment of the mindspore backend")
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = Options(arguments.tokens, arguments.rounds)
    results: dict[str, dict[str, float]] = {}
    for device in DEVICES:
        model = ModelThread(lambda device=device: ScriptedModel(device))
        results |= measure(str(device), model, ServingConfig(), options)
    if arguments.model:
        deployment = load_deployment(arguments.model)
        results |= measure(arguments.model, real_model(deployment), deployment.serving, options)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
