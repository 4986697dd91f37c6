"""OpenVINO GenAI in its own environment, driven by JSON lines on stdin. Needs no mindstream.

usage: openvino_worker.py MODEL THREADS        MODEL: a .gguf file or a directory with the IR

Each line {"prompts": [[token ids], ...], "new": n} is generated in one batch, greedily and without
an early end; the answer has the fields of contenders.Result.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    """Loads the model, says with which settings, answers until stdin ends."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    settings = _settings(int(sys.argv[2]))
    pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", settings)
    print(json.dumps({"version": openvino.__version__, **settings}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(pipeline, json.loads(line))), flush=True)


def _settings(threads: int) -> dict[str, Any]:
    """What the documentation of the CPU device recommends, said rather than left to defaults.

    One batch runs at a time, so LATENCY (one stream on all threads), not THROUGHPUT (a stream a
    core for requests side by side). The KV cache stays at its default, 8 bits.
    """
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if "BF16" in able else "f32",
        "INFERENCE_NUM_THREADS": threads,
    }


def _answer(pipeline: Any, request: dict[str, Any]) -> dict[str, float]:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request["new"]
    config.min_new_tokens = request["new"]
    config.ignore_eos = True
    config.do_sample = False
    prompts = [openvino.Tensor(np.array([ids], np.int64)) for ids in request["prompts"]]
    began = time.perf_counter()
    results = pipeline.generate(prompts, [config] * len(prompts))
    seconds = time.perf_counter() - began
    metrics = [result.perf_metrics for result in results]
    first = min(metric.get_ttft().mean for metric in metrics) / 1e3
    return {
        "prompt_tokens": sum(metric.get_num_input_tokens() for metric in metrics),
        "tokens": sum(len(result.m_generation_ids[0]) for result in results),
        "seconds": seconds,
        "ttft": first,
        "decode_seconds": seconds - first,
    }


if __name__ == "__main__":
    main()
