"""The scenarios that need a server or two, run once: their figures have their names and values."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

TESTS = Path(__file__).parents[1]
SCENARIOS = TESTS.parent / "benchmarks" / "scenarios.py"
PEAK = "peak memory of the server"


def figures(folder: Path, *arguments: str) -> dict[str, float]:
    """Values by name."""
    file = folder / "figures.json"
    ran = subprocess.run(
        [sys.executable, str(SCENARIOS), "--rounds", "1", *arguments, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    return {figure["name"]: figure["value"] for figure in json.loads(file.read_text())["figures"]}


def test_batching_interference_and_memory_on_echo(tmp_path: Path) -> None:
    step = ("--set", "echo.delay_ms=5", "--set", "max_batched_tokens=2048")
    chosen = ("--only", "batching", "interference", "memory", "--pause", "0.3")
    found = figures(tmp_path, "--model", "echo", *step, *chosen)
    assert list(found) == [
        "8 streams to 1 (100-word prompts, 64 tokens)",
        "32 streams to 1 (100-word prompts, 64 tokens)",
        "p99 gap of 8 streams during a 1500-token prefill to their median",
        PEAK,
        "memory of an open stream, 1000 open",
    ]
    assert all(value > 0 for value in found.values()), found


@pytest.fixture
def small_deployment(tmp_path: Path) -> Path:
    """A random model with room for the scenarios' prompts; its tokens are bytes."""
    where = TESTS / "goldens" / "tiny_models.py"
    spec = importlib.util.spec_from_file_location("tiny_models", where)
    assert spec is not None and spec.loader is not None
    tiny: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    folder: Path = tiny.write_model(tmp_path / "small", "tiny-llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    document = {
        "use_legacy": False,
        "run_mode": "predict",
        "model": {"model_config": {"block_size": 16, "num_blocks": 2048}},
        "context": {"mode": 0, "device_target": "CPU"},
        "serving": {"tokenizer": "bytes"},
    }
    (folder / "deploy.yaml").write_text(yaml.safe_dump(document))
    return folder


@pytest.mark.model
def test_endpoint_on_a_small_model(small_deployment: Path, tmp_path: Path) -> None:
    found = figures(tmp_path, "--model", str(small_deployment), "--only", "endpoint")
    assert list(found) == [PEAK, "endpoint to engine in process, 32 streams"]
    assert all(value > 0 for value in found.values()), found
