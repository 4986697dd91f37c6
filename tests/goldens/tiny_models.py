"""Small random checkpoints, the same on every machine: numpy's RandomState is frozen.

Used by make_goldens.py, which computes the reference logits, and by the tests, which serve them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 26, 43, 38, 32, 79, 50, 28, 84, 197, 169, 9]

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny-qwen2": {
        **_BASE,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 128,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "tiny-qwen3": {
        **_BASE,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": True,
        "head_dim": 32,  # not hidden_size / heads
        "attention_bias": False,
        "rope_theta": 1000000.0,
    },
    "tiny-llama": {
        **_BASE,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 96,
        "head_dim": 32,
        "attention_bias": False,
        "mlp_bias": False,
    },
}


def tensors(name: str, **changes: Any) -> dict[str, NDArray[np.float32]]:
    """The model's tensors in float32; every value is exact in bfloat16 and in float16.

    So the three file types hold the same model and share one reference. `changes` to its
    configuration make another model, which has none.
    """
    config = MODELS[name] | changes
    random = np.random.RandomState(sum(map(ord, name)))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q_rows, kv_rows = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found: dict[str, NDArray[np.float32]] = {}

    def add(key: str, *shape: int, mean: float = 0.0, scale: float = 0.12) -> None:
        values = np.clip(random.standard_normal(shape) * scale, -0.9, 0.9)
        # Multiples of 1/128 below 2 have at most 8 significant bits, as many as bfloat16 keeps.
        found[key] = (mean + np.round(values * 128) / 128).astype(np.float32)

    add("model.embed_tokens.weight", config["vocab_size"], hidden, scale=0.25)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        add(f"{layer}.input_layernorm.weight", hidden, mean=1.0, scale=0.3)
        for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            add(f"{layer}.self_attn.{letter}_proj.weight", rows, hidden)
            if config["model_type"] == "qwen2":
                add(f"{layer}.self_attn.{letter}_proj.bias", rows, scale=0.3)
        if config["model_type"] == "qwen3":
            add(f"{layer}.self_attn.q_norm.weight", dim, scale=0.4)
            add(f"{layer}.self_attn.k_norm.weight", dim, scale=0.4)
        add(f"{layer}.self_attn.o_proj.weight", hidden, q_rows)
        add(f"{layer}.post_attention_layernorm.weight", hidden, scale=0.4)
        add(f"{layer}.mlp.gate_proj.weight", inner, hidden)
        add(f"{layer}.mlp.up_proj.weight", inner, hidden)
        add(f"{layer}.mlp.down_proj.weight", hidden, inner)
    add("model.norm.weight", hidden, scale=0.4)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", config["vocab_size"], hidden)
    return found


def write_model(
    folder: Path, name: str, dtype: str = "F32", shards: int = 1, **changes: Any
) -> Path:
    """Writes an HF-style weight directory; `dtype` is a safetensors name. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name] | changes, indent=2))
    everything = list(tensors(name, **changes).items())
    size = -(-len(everything) // shards)
    for index in range(shards):
        part = dict(everything[index * size : (index + 1) * size])
        stem = "model" if shards == 1 else f"model-{index + 1:05}-of-{shards:05}"
        write_safetensors(folder / f"{stem}.safetensors", part, dtype)
    return folder


def write_safetensors(path: Path, part: dict[str, NDArray[np.float32]], dtype: str) -> None:
    """The safetensors format by hand: numpy has no bfloat16."""
    header: dict[str, Any] = {}
    pieces: list[bytes] = []
    offset = 0
    for key, values in part.items():
        if dtype == "BF16":
            piece = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            piece = values.astype("<f2" if dtype == "F16" else "<f4").tobytes()
        end = offset + len(piece)
        header[key] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, end]}
        pieces.append(piece)
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(pieces))
