"""A deployment -> what MindFormers is to build. Pure: no MindSpore, no weights, any thread.

config.json of the weight directory lies under the yaml's `model.model_config`, as MindFormers
merges them itself. What cannot work is refused here with a sentence that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment

# model_type of config.json -> model_type of MindFormers' mcore inference model.
FAMILIES = {
    "llama": "qwen2",  # the Qwen2 model without bias is the LLaMA architecture
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "glm4": "glm4",
    "glm4_moe": "glm4_moe",
}
# Operators of a family that have no CPU kernel in MindSpore 2.9 and no equivalent here.
_CPU_GAPS = {
    "qwen3_moe": "MoeInitRoutingV2, MoeTokenUnpermute and GroupedMatmul",
    "glm4_moe": "MoeInitRoutingV2, MoeTokenUnpermute and GroupedMatmul",
    "glm4": "ApplyRotaryPosEmb over a part of the head",
}
_DTYPES = (
    "compute_dtype",
    "params_dtype",
    "layernorm_compute_dtype",
    "softmax_compute_dtype",
    "rotary_dtype",
)
# MindFormers' own, which hold when the yaml says nothing.
_BLOCK_SIZE, NUM_BLOCKS = 32, 1024


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is built, and the sizes everything else is derived from. Counts, not bytes."""

    model_dir: Path
    device: str  # "CPU" or "Ascend"
    family: str  # MindFormers' model_type
    model_config: Mapping[str, Any]  # config.json under model.model_config, as MindFormers takes it
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    qkv_bias: bool
    tied: bool
    block_size: int
    num_blocks: int  # of the yaml, or 0; serving.kv_cache_gib overrides it

    def kv_block_bytes(self, element_bytes: int) -> int:
        """Bytes of one block of keys and values in all layers."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * element_bytes


def plan_model(deployment: Deployment) -> ModelPlan:
    """Reads and checks; raises ConfigError."""
    yaml_file = deployment.path.name
    _check_yaml(deployment.mindformers, yaml_file)
    if deployment.model_dir is None:
        raise ConfigError(f"{yaml_file}: no weight directory is named (pretrained_model_dir).")
    device = _device(deployment.mindformers, yaml_file)
    hf = read_config_json(deployment.model_dir)
    _check_architecture(hf, deployment.model_dir / "config.json")
    family = FAMILIES[hf["model_type"]]
    if device == "CPU" and family in _CPU_GAPS:
        raise ConfigError(
            f"config.json: model_type {hf['model_type']!r} needs operators that have no CPU kernel "
            f"({_CPU_GAPS[family]}); it runs on context.device_target Ascend only."
        )
    merged = _merge(hf, deployment.mindformers, family, device, yaml_file)
    return _plan(merged, deployment.model_dir, device, family)


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """config.json of a weight directory; raises ConfigError."""
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ConfigError(f"weight directory {model_dir} does not exist.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"weight directory {model_dir} has no config.json.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def _check_yaml(yaml: Mapping[str, Any], name: str) -> None:
    if yaml.get("use_legacy", True) is not False:
        given = yaml.get("use_legacy", "absent")
        raise ConfigError(
            f"{name}: use_legacy is {given}: MindFormers' legacy models are not supported; "
            "write `use_legacy: False` and a pretrained_model_dir with a Hugging Face checkpoint."
        )
    mode = _mapping(yaml, "context", name).get("mode", 0)
    if mode not in (0, "GRAPH_MODE"):
        raise ConfigError(f"{name}: context.mode is {mode}, expected 0 (graph mode).")
    if yaml.get("use_parallel", False):
        raise ConfigError(f"{name}: use_parallel is True: several cards are not supported yet.")
    if yaml.get("run_mode", "predict") != "predict":
        raise ConfigError(f"{name}: run_mode is {yaml['run_mode']!r}, expected 'predict'.")


def _mapping(yaml: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = yaml.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: {key} is {value!r}, expected a block of fields.")
    return value


def _device(yaml: Mapping[str, Any], name: str) -> str:
    device = _mapping(yaml, "context", name).get("device_target", "Ascend")
    if device not in ("CPU", "Ascend"):
        raise ConfigError(f"{name}: context.device_target is {device!r}, expected CPU or Ascend.")
    return str(device)


def _check_architecture(hf: Mapping[str, Any], path: Path) -> None:
    """What MindFormers' models would compute wrongly, or not at all, without saying so."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{path}: model_type {kind!r} is not supported; supported: {known}.")
    if hf.get("quantization_config"):
        raise ConfigError(f"{path}: quantization_config: quantised checkpoints are not supported.")
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act is {hf['hidden_act']!r}, expected 'silu'.")
    if hf.get("use_sliding_window") or (kind == "llama" and hf.get("sliding_window")):
        raise ConfigError(f"{path}: sliding-window attention is not supported by MindFormers.")
    if kind == "llama" and (hf.get("attention_bias") or hf.get("mlp_bias")):
        raise ConfigError(
            f"{path}: a llama model with attention_bias or mlp_bias is not supported."
        )
    scaling = hf.get("rope_scaling") or {}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    if rope not in ("default", "yarn"):
        # MindFormers 1.9.0 reads low_freq_factor where llama3 scaling needs high_freq_factor.
        raise ConfigError(f"{path}: rope_scaling of type {rope!r} is not supported.")


def _merge(
    hf: dict[str, Any], yaml: Mapping[str, Any], family: str, device: str, name: str
) -> dict[str, Any]:
    own = _mapping(_mapping(yaml, "model", name), "model_config", name)
    merged = {**hf, **own, "model_type": family}
    if family != hf["model_type"]:
        merged["architectures"] = ["Qwen2ForCausalLM"]
        merged.pop("attention_bias", None)
        merged.pop("mlp_bias", None)
    if family == "qwen2":
        bias = hf["model_type"] == "qwen2"
        if own.get("add_qkv_bias", bias) is not bias:
            raise ConfigError(
                f"{name}: model.model_config.add_qkv_bias is {own['add_qkv_bias']}, but "
                f"config.json says model_type {hf['model_type']!r}, whose projections need {bias}."
            )
        merged["add_qkv_bias"] = bias
    if "rope_theta" not in merged:
        merged["rope_theta"] = (hf.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    if device == "CPU":
        for field in _DTYPES:
            if merged.setdefault(field, "float32") != "float32":
                raise ConfigError(
                    f"{name}: model.model_config.{field} is {merged[field]!r}; "
                    "on CPU every dtype is float32 (MindSpore computes no other there)."
                )
    return merged


def _plan(merged: dict[str, Any], model_dir: Path, device: str, family: str) -> ModelPlan:
    heads = _count(merged, "num_attention_heads", model_dir)
    hidden = _count(merged, "hidden_size", model_dir)
    merged.setdefault("num_key_value_heads", heads)
    merged.setdefault("head_dim", hidden // heads)
    kv_heads = _count(merged, "num_key_value_heads", model_dir)
    if heads % kv_heads:
        raise ConfigError(
            f"{model_dir / 'config.json'}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}."
        )
    merged.setdefault("block_size", _BLOCK_SIZE)
    num_blocks = _count(merged, "num_blocks", model_dir) if "num_blocks" in merged else 0
    merged.setdefault("num_blocks", NUM_BLOCKS)
    return ModelPlan(
        model_dir=model_dir,
        device=device,
        family=family,
        model_config=merged,
        layers=_count(merged, "num_hidden_layers", model_dir),
        hidden=hidden,
        intermediate=_count(merged, "intermediate_size", model_dir),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_count(merged, "head_dim", model_dir),
        vocab=_count(merged, "vocab_size", model_dir),
        max_positions=_count(merged, "max_position_embeddings", model_dir),
        qkv_bias=bool(merged.get("add_qkv_bias", merged.get("attention_bias", False))),
        tied=bool(merged.get("tie_word_embeddings", False)),
        block_size=_count(merged, "block_size", model_dir),
        num_blocks=num_blocks,
    )


def _count(merged: Mapping[str, Any], field: str, model_dir: Path) -> int:
    value = merged.get(field)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    own = ("block_size", "num_blocks")
    where = "model.model_config" if field in own else str(model_dir / "config.json")
    given = "missing" if value is None else repr(value)
    raise ConfigError(f"{where}: {field} is {given}, expected a whole number above 0.")
