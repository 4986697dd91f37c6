"""What rounding the weights costs: the demo model's perplexity on a fixed text, to float32's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from mindstream.backends.mindspore.cpu.fused_weights import FusedShape, FusedWeights
from mindstream.backends.mindspore.weights import Float32Slice, read_headers
from mindstream.plugin import paths

pytestmark = pytest.mark.model
TEXT = Path(__file__).with_name("fixed_text.txt")
Call = Callable[..., int]


def shape_of(model_dir: Path) -> tuple[FusedShape, float]:
    config = json.loads((model_dir / "config.json").read_text())
    shape = FusedShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        block_size=16,
        eps=config["rms_norm_eps"],
        tied=config["tie_word_embeddings"],
    )
    return shape, float(config["rope_theta"])


def perplexity(call: Call, model_dir: Path, ids: list[int], weights: str, cache: str) -> float:
    shape, theta = shape_of(model_dir)
    loaded = FusedWeights(shape, weights, cache)
    for name, entry in read_headers(model_dir).items():
        loaded.put(name, "F32", np.asarray(Float32Slice(entry)[:]))
    loaded.finish()
    count = len(ids) - 1
    blocks = -(-count // shape.block_size)
    positions, half = np.arange(count, dtype=np.int32), shape.head_dim // 2
    angles = positions[:, None] / theta ** (np.arange(shape.head_dim) % half / half)
    model = np.array([loaded.handle], np.int64)
    keys, values = (np.zeros(shape.cache_shape(blocks, cache), np.float32) for _ in range(2))
    rotary = [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
    length, table = np.array([count], np.int32), np.arange(blocks, dtype=np.int32)[None]
    like, prompt = np.zeros(shape.vocab, np.float32), np.array(ids[:-1], np.int32)
    inputs = [
        model,
        like,
        *rotary,
        prompt,
        positions,
        positions,
        table,
        length,
        length,
        positions,
        keys,
        values,
    ]
    logits = np.zeros((count, shape.vocab), np.float32)
    assert call("LanguageModel", *inputs, logits) == 0
    loaded.close()
    top = logits.max(1)
    total = np.log(np.exp(logits - top[:, None]).sum(1, dtype=np.float64)) + top
    return float(np.exp((total - logits[np.arange(count), ids[1:]]).mean()))


def test_rounded_weights_cost_what_the_documentation_says(call: Call) -> None:
    """`serving.cpu.weights` in model_configs: bf16 with its cache within 0.1 %, int8 within 1 %."""
    model_dir = paths.models_dir() / "smollm2-135m"
    if not model_dir.is_dir():
        pytest.skip("the demo model is not pulled: mindstream pull smollm2-135m")
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = tokenizer.encode(TEXT.read_text()).ids
    exact = perplexity(call, model_dir, ids, "f32", "f32")
    assert 5 < exact < 60
    found = {
        (weights, cache): perplexity(call, model_dir, ids, weights, cache) / exact - 1
        for weights, cache in (("bf16", "f32"), ("bf16", "bf16"), ("int8", "bf16"))
    }
    print(f"float32: {exact:.3f}", found)
    assert abs(found["bf16", "f32"]) < 0.001
    assert abs(found["bf16", "bf16"]) < 0.001
    assert abs(found["int8", "bf16"]) < 0.01
