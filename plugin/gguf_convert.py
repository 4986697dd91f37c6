"""A GGUF file of the LLaMA architecture -> an HF-style weight directory (float32 safetensors).

llama.cpp stores the rows of the q and k projections interleaved for its rotary embedding; they are
put back into the half-split order that HF checkpoints and MindFormers use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindstream.plugin.errors import ConfigError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type, by the GGUF specification


def convert(gguf_file: Path, out: Path) -> None:
    """Writes model.safetensors, the two configuration files and the tokenizer into `out`."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            "pulling a demo model needs the package `gguf`: pip install 'mindstream[pull]'."
        ) from error
    reader = GGUFReader(gguf_file)
    meta = {name: reader.fields[name] for name in reader.fields}
    if _value(meta, "general.architecture") != "llama":
        found = _value(meta, "general.architecture")
        raise ConfigError(f"{gguf_file.name} holds a {found!r} model; only 'llama' is converted.")
    names = {_hf_name(tensor.name) for tensor in reader.tensors}
    config = _config(meta, tied="lm_head.weight" not in names)
    _write_tokenizer(meta, out, config)
    _write_json(out / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "generation_config.json", ids)
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    _write_safetensors(out / "model.safetensors", reader.tensors, heads)


def _value(meta: dict[str, Any], name: str) -> Any:
    return meta[name].contents()


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = _value(meta, "llama.attention.head_count")
    hidden = _value(meta, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": _value(meta, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(meta, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(meta, "tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _value(meta, "llama.feed_forward_length"),
        "max_position_embeddings": _value(meta, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _value(meta, "llama.block_count"),
        "num_key_value_heads": _value(meta, "llama.attention.head_count_kv"),
        # Stored as float32; six digits give back the decimal it was written from.
        "rms_norm_eps": float(f"{_value(meta, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": None,
        "rope_theta": _value(meta, "llama.rope.freq_base"),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": _value(meta, "llama.vocab_size"),
    }


def _write_tokenizer(meta: dict[str, Any], out: Path, config: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _value(meta, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _value(meta, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # The `smollm` pre-tokenizer splits numbers into digits first; ByteLevel alone gives wrong ids.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(meta, "tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[_value(meta, "tokenizer.ggml.unknown_token_id")],
            "additional_special_tokens": [],
            "chat_template": _value(meta, "tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: list[Any], heads: tuple[int, int]) -> None:
    """Streams the file one tensor at a time, so that the peak is one tensor and not the model."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        size = int(tensor.n_elements) * 4
        header[_hf_name(tensor.name)] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for piece in _dequantised(tensors, heads):
            file.write(piece)


def _dequantised(tensors: list[Any], heads: tuple[int, int]) -> Iterator[bytes]:
    """Yields little-endian float32 bytes, one tensor a time, in the order given."""
    import numpy as np
    from gguf import dequantize

    for tensor in tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), "<f4").reshape(shape)
        for kind, count in (("attn_q", heads[0]), ("attn_k", heads[1])):
            if f".{kind}." in tensor.name:
                rows = values.reshape(count, -1, 2, *shape[1:])
                values = rows.swapaxes(1, 2).reshape(shape)
        yield values.tobytes()
