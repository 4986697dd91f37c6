"""Compiled graphs on disk: reused by the next process, never trusted after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindstream.backends.mindspore import graph_cache


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has compiled nothing yet."""
    monkeypatch.setattr(graph_cache, "_used", False)
    for name in ("MS_COMPILER_CACHE_PATH", "MS_COMPILER_CACHE_ENABLE"):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("first")
def test_what_an_interrupted_start_left_is_thrown_away(tmp_path: Path) -> None:
    half = tmp_path / "rank_0" / "graph_cache"
    half.mkdir(parents=True)
    with pytest.raises(RuntimeError), graph_cache.owned(tmp_path):
        assert not half.exists()
        half.mkdir(parents=True)
        raise RuntimeError("the device fell over")
    assert not (tmp_path / "complete").exists()
    assert os.environ["MS_COMPILER_CACHE_ENABLE"] == "0"


@pytest.mark.usefixtures("first")
def test_only_the_first_model_of_a_process_uses_it(tmp_path: Path) -> None:
    with graph_cache.owned(tmp_path / "a"):
        assert os.environ["MS_COMPILER_CACHE_PATH"] == str(tmp_path / "a")
        assert os.environ["MS_COMPILER_CACHE_ENABLE"] == "1"
    with graph_cache.owned(tmp_path / "b"):
        assert os.environ["MS_COMPILER_CACHE_ENABLE"] == "0"
    assert (tmp_path / "a" / "complete").exists() and not (tmp_path / "b").exists()


@pytest.mark.model
@pytest.mark.parametrize("kernels", ["fused", "attention"])
def test_a_second_process_reads_the_first_ones_graphs(
    tiny_deployment: Callable[..., Path],
    start_worker: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kernels: str,
) -> None:
    folder = tiny_deployment("tiny-llama")
    monkeypatch.setenv("MINDSTREAM_CACHE", str(tmp_path))
    logits, stamps = [], []
    size = {"model__model_config__block_size": "16"}
    for _ in range(2):
        worker = start_worker().load(folder, cpu__kernels=kernels, **size)
        logits.append(worker.step([([5, 6, 7], 0, [3])]))
        worker.close()
        files = sorted((tmp_path / "graphs").rglob("*.mindir"))
        stamps.append([(file.name, file.stat().st_mtime_ns) for file in files])
    assert [name for name, _ in stamps[0]] == ["compile_cache_0.mindir"]
    assert stamps[0] == stamps[1]
    assert (logits[0] == logits[1]).all()
