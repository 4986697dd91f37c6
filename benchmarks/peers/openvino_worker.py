"""OpenVINO GenAI in its own environment, driven by JSON lines on stdin. Needs no mindstream.

usage: openvino_worker.py MODEL.gguf

Each line {"prompts": [[token ids], ...], "new": n} is generated in one batch, greedily and without
an early end; the answer {"seconds": s, "tokens": n} counts all new tokens, prefill included.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    """Loads the model, says {"ready": version}, answers until stdin ends."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        sys.argv[1], scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}
    )
    print(json.dumps({"ready": openvino.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["new"]
        config.min_new_tokens = request["new"]
        config.ignore_eos = True
        config.do_sample = False
        prompts = [openvino.Tensor(np.array([ids], np.int64)) for ids in request["prompts"]]
        began = time.perf_counter()
        results = pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - began
        tokens = sum(len(result.m_generation_ids[0]) for result in results)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
