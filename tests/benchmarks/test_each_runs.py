"""The benchmarks that no other test runs still measure something, however fast."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindstream.plugin import paths

FOLDER = Path(__file__).parents[2] / "benchmarks"


def table_of(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "row"),
    [
        ("engine_bench.py", ("--steps", "20"), r"decode +[\d.]+"),
        ("engine_link.py", (), r"256 socket pair +\d+"),
        ("engine_overlap.py", ("--rounds", "1", "--tokens", "4"), r"32 streams: .* ratio [\d.]+"),
    ],
)
def test_without_a_model(script: str, arguments: tuple[str, ...], row: str) -> None:
    assert re.search(row, table_of(script, *arguments))


@pytest.mark.model
@pytest.mark.parametrize(
    ("script", "arguments", "row"),
    [
        ("bare_graph.py", ("--rounds", "1", "--new-tokens", "8"), r"bare graph's +\| [\d.]+ %"),
        (
            "decode_shapes.py",
            ("--kernels", "fused", "--sequences", "2", "--rounds", "1"),
            r"\| fused \| 2 \| [\d.]+ ms \| [\d.]+ ms \| [\d.]+ \|",
        ),
        ("kernel_bench.py", ("--only", "prefill, 115", "--repeat", "1"), r"prefill, 115 tokens"),
    ],
)
def test_with_the_demo_model(script: str, arguments: tuple[str, ...], row: str) -> None:
    if not (paths.models_dir() / "smollm2-135m").is_dir():
        pytest.skip("the demo model is not pulled: mindstream pull smollm2-135m")
    assert re.search(row, table_of(script, *arguments))
