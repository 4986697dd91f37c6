"""The engine without HTTP, text and second process: what the endpoint's speed is compared with.

Run by scenarios.py as a process that reads one JSON document a line, `{"prompts": [[id, ...], ...],
"streams": 32, "max_new_tokens": 64}`, keeps that many requests running until all are done, and
answers with `{"tokens": ..., "seconds": ...}`. The first line it writes is `{"ready": true}`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence

from mindstream.backends.engine.loop import Engine
from mindstream.backends.engine.messages import Submit
from mindstream.backends.engine.overlap import make_engine, make_model
from mindstream.backends.engine.sampler import Sampler
from mindstream.plugin.defaults import resolve_defaults
from mindstream.plugin.model_config import Deployment, load_deployment
from mindstream.plugin.request import GenerationRequest
from mindstream.plugin.watermark import load_key

_STEP_MODELS = {"mindspore": "mindstream.backends.mindspore.step_model:MindSporeStepModel"}


def open_engine(deployment: Deployment) -> Engine:
    """The deployment's model in this process, loaded."""
    module, _, attribute = _STEP_MODELS[deployment.serving.backend].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    model = make_model(lambda: factory(deployment), deployment.serving)
    return make_engine(model, model.load(), deployment.serving, Sampler(load_key(deployment)))


def drive(engine: Engine, requests: Sequence[GenerationRequest], streams: int) -> tuple[int, float]:
    """Runs all of them, `streams` at a time; (tokens, seconds). Raises RuntimeError."""
    waiting: Iterator[tuple[int, GenerationRequest]] = iter(enumerate(requests))
    tokens = 0
    began = time.perf_counter()
    free = streams
    while True:
        for _, (key, request) in zip(range(free), waiting, strict=False):
            engine.apply(Submit(key, request, time.monotonic()))
        if engine.idle:
            return tokens, time.perf_counter() - began
        engine.step()
        report = engine.report()
        if report.failures:
            raise RuntimeError(report.failures[0].message)
        tokens += len(report.deltas)
        free = sum(1 for delta in report.deltas if delta.finish)


def main() -> None:
    """Serves standard input until it ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is not an answer
    deployment = load_deployment(sys.argv[1], dict(pair.split("=", 1) for pair in sys.argv[2:]))
    engine = open_engine(deployment)
    ends = resolve_defaults(deployment).eos_token_ids.value
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        requests = [
            GenerationRequest(str(i), tuple(ids), order["max_new_tokens"], eos_token_ids=ends)
            for i, ids in enumerate(order["prompts"])
        ]
        tokens, seconds = drive(engine, requests, order["streams"])
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
