"""Deployments that cannot work end in one sentence, before MindSpore is even imported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from mindstream.backends.mindspore import environment
from mindstream.backends.mindspore.config import plan_model
from mindstream.backends.mindspore.cpu.kernel_sets import select
from mindstream.backends.mindspore.step_model import MindSporeStepModel
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import load_deployment


@pytest.fixture
def folder(tiny: ModuleType, tmp_path: Path) -> Path:
    """A weight directory that would work, as a copy to break."""
    return Path(tiny.write_model(tmp_path / "tiny", "tiny-qwen2"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def write_yaml(folder: Path, serving: dict[str, Any] | None = None, **changes: Any) -> Path:
    value: dict[str, Any] = {
        "use_legacy": False,
        "model": {"model_config": {"block_size": 4, "num_blocks": 64}},
        "context": {"mode": 0, "device_target": "CPU"},
        "serving": serving or {},
    }
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (value | changes).items() if v != "absent"}))
    return path


def refusal(folder: Path) -> str:
    """What loading the directory is refused with."""
    with pytest.raises(ConfigError) as caught:
        MindSporeStepModel(load_deployment(folder)).load()
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"use_legacy": "absent"},
            r"deploy.yaml: use_legacy is absent: MindFormers' legacy models",
        ),
        ({"use_legacy": True}, r"use_legacy is True: .* write `use_legacy: False`"),
        ({"use_parallel": True}, r"use_parallel is True"),
        ({"run_mode": "train"}, r"run_mode is 'train', expected 'predict'"),
        ({"context": {"mode": 1, "device_target": "CPU"}}, r"context.mode is 1, expected 0"),
        ({"context": {"device_target": "GPU"}}, r"context.device_target is 'GPU', expected CPU or"),
        ({"context": "CPU"}, r"context is 'CPU', expected a block of fields"),
        (
            {"model": {"model_config": {"compute_dtype": "bfloat16"}}},
            r"model.model_config.compute_dtype is 'bfloat16'; on CPU every dtype is float32",
        ),
        (
            {"model": {"model_config": {"num_blocks": 0}}},
            r"model.model_config: num_blocks is 0, expected a whole number above 0",
        ),
        (
            {"model": {"model_config": {"add_qkv_bias": False}}},
            r"add_qkv_bias is False, but config.json says model_type 'qwen2'",
        ),
        (
            {"serving": {"max_seq_len": 300}},
            r"serving.max_seq_len is 300, but config.json allows max_position_embeddings 256",
        ),
        (
            {
                "serving": {"max_seq_len": 250},
                "model": {"model_config": {"num_blocks": 9, "block_size": 4}},
            },
            r"serving.max_seq_len is 250, but the KV cache holds 36 tokens \(9 blocks of 4\)",
        ),
        (
            {"serving": {"kv_cache_gib": 0.000001}},
            r"serving.kv_cache_gib is 1e-06, less than one block of 4 tokens",
        ),
        (
            {"model": {"model_config": {"num_blocks": 10**12}}},
            r"a KV cache of 10+ blocks takes .* GiB .* but [\d.]+ GiB of memory are available",
        ),
    ],
)
def test_yaml(folder: Path, changes: dict[str, Any], expected: str) -> None:
    write_yaml(folder, **changes)
    assert re.search(expected, refusal(folder))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model_type": "gpt2"},
            r"config.json: model_type 'gpt2' is not supported; supported: glm4",
        ),
        ({"model_type": None}, r"model_type None is not supported"),
        ({"model_type": "qwen3_moe"}, r"'qwen3_moe' needs operators that have no CPU kernel"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected 'silu'"),
        ({"use_sliding_window": True}, r"sliding-window attention is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantised checkpoints are not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling of type 'llama3'"),
        ({"vocab_size": None}, r"config.json: vocab_size is missing, expected a whole number"),
        ({"hidden_size": "128"}, r"hidden_size is '128', expected a whole number"),
        ({"num_key_value_heads": 3}, r"num_attention_heads 4 is not a multiple of .* 3"),
        ({"intermediate_size": 97}, r"gate_proj.weight has shape \[96, 128\], but .* \[97, 128\]"),
        ({"num_hidden_layers": 4}, r"model.layers.3.input_layernorm.weight of shape \[128\]"),
        ({"num_hidden_layers": 2}, r"model.layers.2.\S+ has no place in the model .* 2 layers"),
        ({"model_type": "llama"}, r"self_attn.\w_proj.bias has no place in the model"),
    ],
)
def test_config_json(folder: Path, changes: dict[str, Any], expected: str) -> None:
    write_yaml(folder)
    change_config(folder, **changes)
    assert re.search(expected, refusal(folder))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")


def _name_a_lost_shard(folder: Path) -> None:
    index = {"weight_map": {"x": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "model.safetensors").unlink(), r"tiny holds no \*.safetensors file"),
        (lambda f: (f / "config.json").unlink(), r"tiny has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config.json is not readable JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"holds a list, expected a JSON object"),
        (_truncate, r"model.safetensors is not a complete safetensors file: .* ends at byte"),
        (_garble, r"model.safetensors is not a complete safetensors file: its header is longer"),
        (_name_a_lost_shard, r"names model-00002-of-00002.safetensors, missing from"),
    ],
)
def test_weight_directory(folder: Path, damage: Callable[[Path], Any], expected: str) -> None:
    write_yaml(folder)
    damage(folder)
    assert re.search(expected, refusal(folder))


def test_unsupported_tensor_type(folder: Path, tiny: ModuleType) -> None:
    write_yaml(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype": "F32"', b'"dtype": "I32"', 1))
    assert re.search(r"is I32; expected F32, F16 or BF16", refusal(folder))


def test_missing_weight_directory(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, pretrained_model_dir=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"weight directory .*nowhere does not exist"):
        MindSporeStepModel(load_deployment(path)).load()


@pytest.mark.parametrize(
    ("package", "installed", "expected"),
    [
        ("mindspore", None, "needs mindspore 2.9.0, which is not installed"),
        ("mindformers", "2.0.0", "mindformers 2.0.0 is installed; .* mindspore 2.9.0 with"),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, package: str, installed: str | None, expected: str
) -> None:
    def version(name: str) -> str:
        if name != package:
            return environment.SUPPORTED[name]
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(environment, "version", version)
    with pytest.raises(ConfigError, match=expected):
        environment.versions()


@pytest.mark.parametrize(
    ("serving", "built", "expected"),
    [
        ({"kernels": "fused"}, True, r"'fused', but block_size 4 is not a multiple of 16"),
        ({"kernels": "fused"}, False, r"'fused', but mindstream was installed without a C\+\+"),
        ({"kernels": "attention"}, False, r"'attention', but .* use 'stock' or install it again"),
        (
            {"kernels": "stock", "kv_cache": "bf16"},
            True,
            r"kv_cache is 'bf16'; kernels 'stock' keep",
        ),
        (
            {"kv_cache": "bf16"},
            True,
            r"'bf16'; kernels 'attention' \(block_size 4 .*\) keep",
        ),
    ],
)
def test_kernels_that_cannot_be_had(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    serving: dict[str, str],
    built: bool,
    expected: str,
) -> None:
    if not built:
        monkeypatch.setenv("MINDSTREAM_KERNELS", "/nowhere/_kernels.so")
    write_yaml(folder, serving={"cpu": serving})
    assert re.search(expected, refusal(folder))


def test_without_a_compiler_auto_means_stock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINDSTREAM_KERNELS", "/nowhere/_kernels.so")
    deployment = load_deployment(write_yaml(folder))
    assert select(deployment.serving.cpu, plan_model(deployment)).name == "stock"
    (record,) = caplog.records
    why = "mindstream was installed without a C++ compiler"
    assert f"{why}; 'stock' runs (MindSpore's operators alone)" in record.message


@pytest.mark.parametrize(("field", "value"), [("head_dim", 24), ("intermediate_size", 40)])
def test_a_shape_the_fused_kernels_cannot_take_falls_back_with_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture, field: str, value: int
) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), field: value}))
    deployment = load_deployment(write_yaml(folder))
    assert select(deployment.serving.cpu, plan_model(deployment)).name == "attention"
    (record,) = caplog.records
    why = f"{field} {value} is not a multiple of 32"
    assert f"auto: {why} up to" in record.message
    assert "; 'attention' runs (MindSpore's operators with the compiled" in record.message


@pytest.mark.parametrize("kernels", ["auto", "fused", "attention", "stock"])
def test_kernels_that_run_as_asked_say_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, kernels: str
) -> None:
    size = {"model_config": {"block_size": 16, "num_blocks": 64}}
    deployment = load_deployment(write_yaml(folder, {"cpu": {"kernels": kernels}}, model=size))
    chosen = select(deployment.serving.cpu, plan_model(deployment)).name
    assert chosen == ("fused" if kernels == "auto" else kernels)
    assert not caplog.records


def test_a_model_that_cannot_be_loaded_leaves_mindspore_alone(
    start_worker: Callable[[], Any], folder: Path
) -> None:
    """A refusal is quick: nothing of MindSpore is imported for it."""
    write_yaml(folder, use_legacy=True)
    worker = start_worker()
    status, kind, message = worker.ask("load", str(folder), {})
    assert (status, kind) == ("error", "ConfigError") and "use_legacy" in message
    assert worker.ask("imported", "mindspore") == ("ok", False)
    worker.close()
