"""A Hugging Face checkpoint as one GGUF file, for the peers that read only that.

usage: make_gguf.py MODEL_DIR OUT.gguf {f16|bf16}

LLaMA, Qwen2 and Qwen3 architectures with a byte-pair tokenizer.json. Needs gguf and safetensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mindstream.backends.mindspore.weights import Float32Slice, read_headers

_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor; raises KeyError for one it does not have."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's llama architecture rotates neighbours, Hugging Face's rotates halves."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def write(model_dir: Path, out: Path, kind: str) -> None:
    """Writes the file. Matrices in `kind`, vectors in float32."""
    config = json.loads((model_dir / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(out, family)
    _add_sizes(writer, config)
    _add_tokenizer(writer, model_dir, config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, entry in read_headers(model_dir).items():
        if name.endswith("inv_freq"):
            continue
        data = np.asarray(Float32Slice(entry)[:])
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            data = interleaved(data, heads if "q_proj" in name else kv_heads)
        _add_tensor(writer, gguf_name(name), data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: Any, name: str, data: np.ndarray, kind: str) -> None:
    if data.ndim == 1:
        writer.add_tensor(name, data.astype(np.float32))
    elif kind == "f16":
        writer.add_tensor(name, data.astype(np.float16))
    else:
        bits = gguf.quants.quantize(data, gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("benchmark")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(1)


def _add_tokenizer(writer: Any, model_dir: Path, config: dict[str, Any]) -> None:
    stored = json.loads((model_dir / "tokenizer.json").read_text())
    size = config["vocab_size"]
    tokens = [f"[unused{i}]" for i in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for token, number in stored["model"]["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in stored.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL
    merges = [m if isinstance(m, str) else " ".join(m) for m in stored["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    # SmolLM's splits digits apart, Qwen's does not.
    writer.add_tokenizer_pre("smollm" if '"Digits"' in json.dumps(stored) else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config.get("bos_token_id") or 1)
    writer.add_eos_token_id(config.get("eos_token_id") or 2)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
