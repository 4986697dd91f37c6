"""A checkpoint with random weights from a fixed seed, in the layout of a Hugging Face directory.

For sizes whose real weights are not at hand: a step takes as long whatever the weights are. The
directory holds bf16 safetensors, config.json, a tokenizer and a yaml that mindstream serves.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindstream.plugin.model_config import load_deployment

SEED = 20260714
_SPREAD = 0.02  # as trained models are initialised: nothing overflows in f16
_TOKENIZER_OF = "smollm2-135m"

# The sizes of Qwen/Qwen3-0.6B.
_QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
    # Of the tokenizer that is used; every side ignores the end of text.
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {"random-qwen3-0.6b": _QWEN3_06B}

_YAML = """\
run_mode: 'predict'
use_legacy: False
load_checkpoint: ''
load_ckpt_format: 'safetensors'
auto_trans_ckpt: True
use_parallel: False

trainer:
  type: CausalLanguageModelingTrainer
  model_name: 'qwen3'

model:
  model_config:
    compute_dtype: 'float32'
    params_dtype: 'float32'
    layernorm_compute_dtype: 'float32'
    softmax_compute_dtype: 'float32'
    rotary_dtype: 'float32'
    seq_length: 2048
    block_size: 16
    num_blocks: 1024

generation_config:
  do_sample: False

context:
  mode: 0
  device_target: 'CPU'
  device_id: 0

serving:
  name: NAME
  backend: mindspore
  max_seq_len: 2048
"""


def make(name: str, work_dir: Path) -> Path:
    """The directory of one of MODELS, which is a deployment too; written unless it is complete.

    The demo model must have been pulled: its tokenizer is used.
    """
    model_dir = work_dir / name
    if not (model_dir / "config.json").is_file():
        source = load_deployment(_TOKENIZER_OF).model_dir
        if source is None or not (source / "tokenizer.json").is_file():
            raise SystemExit(f"no tokenizer: run `mindstream pull {_TOKENIZER_OF}` first")
        write(model_dir, MODELS[name], source)
    return model_dir


def write(model_dir: Path, config: dict[str, Any], tokenizer_dir: Path) -> None:
    """A Qwen3 checkpoint; `config` is its config.json, which is written last."""
    model_dir.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(model_dir, tokenizer_dir, config["vocab_size"])
    _write_weights(model_dir / "model.safetensors", config)
    (model_dir / f"{model_dir.name}.yaml").write_text(_YAML.replace("NAME", model_dir.name))
    (model_dir / "config.json").write_text(json.dumps(config, indent=1))


def _write_weights(out: Path, config: dict[str, Any]) -> None:
    """In the safetensors format: the header's length, the header, the tensors in its order."""
    shapes = dict(tensor_shapes(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(SEED)
    with out.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = rng.standard_normal(shape, np.float32) * np.float32(_SPREAD)
            if len(shape) == 1:
                # Gains near 1, not 1 itself: a side that left a norm out would answer differently.
                values = 1 + 5 * values
            stream.write(bfloat16(values).tobytes())


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Qwen3 checkpoint with tied embeddings, in the order of drawing."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (wide, hidden)
        yield at + "self_attn.k_proj.weight", (narrow, hidden)
        yield at + "self_attn.v_proj.weight", (narrow, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, wide)
        yield at + "self_attn.q_norm.weight", (head,)
        yield at + "self_attn.k_norm.weight", (head,)
        yield at + "mlp.gate_proj.weight", (inner, hidden)
        yield at + "mlp.up_proj.weight", (inner, hidden)
        yield at + "mlp.down_proj.weight", (hidden, inner)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _write_tokenizer(model_dir: Path, source: Path, vocab_size: int) -> None:
    """That of `source`, with entries that no text gives up to the size of the vocabulary.

    So a prompt is the same ids everywhere, and every id a random model gives has a text.
    """
    stored = json.loads((source / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    vocab |= {f"[unused{number}]": number for number in range(len(vocab), vocab_size)}
    (model_dir / "tokenizer.json").write_text(json.dumps(stored, ensure_ascii=False))
    shutil.copy(source / "tokenizer_config.json", model_dir)
