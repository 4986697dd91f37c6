"""The scenarios measure what they say; whether a target is met is no business of a test."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindstream.backends.engine.loop import Engine
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.step_model import Batch, Float32
from mindstream.plugin.backend import Limits
from mindstream.plugin.request import GenerationRequest
from mindstream.plugin.serving_config import ServingConfig

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of benchmarks/, which are scripts and not a package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_serve_bench_starts_a_server_and_measures_it(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    load = ("--streams", "1", "4", "--requests", "6", "--max-new-tokens", "20")
    ran = run("serve_bench.py", "--serve", "echo", *load, "--json", str(file))
    assert ran.returncode == 0, ran.stderr
    document = json.loads(file.read_text())
    assert document["model"] == "echo"
    for streams, level in zip((1, 4), document["levels"], strict=True):
        assert (level["streams"], level["requests"], level["failures"]) == (streams, 6, 0)
        assert level["tokens"] == 6 * 20
        assert 10 < level["peak_memory_mib"] < 2000
        assert 0 < level["ttft_p50_ms"] <= level["ttft_p99_ms"]
        assert level["tokens_per_second"] == pytest.approx(120 / level["seconds"], rel=0.05)
    assert "tokens/s" in ran.stdout


def test_serve_bench_says_why_a_server_did_not_start() -> None:
    ran = run("serve_bench.py", "--serve", "nothing-of-this-name")
    assert ran.returncode == 2
    assert "the server ended with status 2" in ran.stderr
    assert "nothing-of-this-name" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_scenarios_run_on_echo(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    slow = ("--set", "echo.delay_ms=50")
    chosen = ("--rounds", "1", "--only", "start", "prefix", "front", "scheduler")
    ran = run("scenarios.py", "--model", "echo", *slow, *chosen, "--json", str(file))
    assert ran.returncode == 0, ran.stderr
    figures = {figure["name"]: figure for figure in json.loads(file.read_text())["figures"]}
    assert len(figures) == 5
    assert figures["second start: until ready"]["target"] is None
    # 1,000 tokens are two steps of 50 ms, the repeated ones one.
    assert figures["TTFT with a repeated 1000-token prefix to cold"]["value"] < 100
    assert all(figure["value"] > 0 for figure in figures.values())
    assert ran.stdout.startswith("| what ")


@pytest.mark.model
def test_the_engine_says_how_long_the_parts_of_its_loading_took(
    bench: Any, serve_process: Callable[..., Any]
) -> None:
    """In the words that the scenario `start` reads."""
    began = time.monotonic()
    server = serve_process("smollm2-135m")
    parts = bench("model_scenarios").load_parts(server.text)
    assert set(parts) == {"imports", "weights and graph"}
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) < time.monotonic() - began


@dataclass
class Gap:
    arrivals: Sequence[float]


def test_gaps_are_told_apart_by_the_window_they_touch(bench: Any) -> None:
    streams = [Gap([0.0, 1.0, 2.5, 3.0, 4.5]), Gap([2.0, 2.2])]
    usual, disturbed = bench("model_scenarios")._gaps(streams, [(2.1, 2.6), (4.4, 9.0)])
    assert usual == [1000.0]
    assert disturbed == pytest.approx([1500, 500, 1500, 200])


def test_a_figure_knows_whether_it_meets_its_target(bench: Any) -> None:
    figure = bench("figures").Figure
    assert figure("a", 4.0, "x", 4, True).met
    assert not figure("a", 3.9, "x", 4, True).met
    assert figure("a", 4.0, "x", 4, False).met
    assert not figure("a", 4.1, "x", 4, False).met
    assert figure("a", 4.0, "x", None, False).met is None
    rows = [figure("a", 12345.6, "x", 4, False), figure("b", 2.0, "s", None, False)]
    table = bench("figures").markdown(rows).splitlines()
    assert "| a    | 12346 x  | at most 4 x | NO  |" in table
    assert "| b    | 2 s      |             |     |" in table


def test_the_engine_driver_keeps_its_streams_running(bench: Any) -> None:
    sizes: list[int] = []

    class Model:
        def load(self) -> Limits:
            return Limits(16, 64, 8, 4, 128)

        def forward(self, batch: Batch) -> Float32:
            sizes.append(len(batch.q_seq_lens))
            return np.ones((len(batch.logits_rows), 16), np.float32)

        def close(self) -> None:
            """Nothing to free."""

    model = Model()
    engine = Engine(model, model.load(), ServingConfig(max_batch_size=8), Sampler(None))
    requests = [GenerationRequest(str(i), (1 + i, 2), 5) for i in range(10)]
    tokens, seconds = bench("engine_driver").drive(engine, requests, 4)
    assert tokens == 50
    assert seconds > 0
    assert max(sizes) == 4
    assert sum(sizes) >= 50
