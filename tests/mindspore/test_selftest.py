"""`mindstream selftest` as a user runs it: the report, the exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from mindstream.plugin import paths

MAIN = [sys.executable, "-c", "from mindstream.plugin.cli import main; main()", "selftest"]


def run(target: str, folder: Path) -> tuple[int, str]:
    """(exit status, report) of one self-test, run in `folder`."""
    report = folder / "report.md"
    command = [*MAIN, target, "--report", str(report)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, report.read_text()


@pytest.mark.model
def test_the_demo_model_passes(tmp_path: Path) -> None:
    if not (paths.models_dir() / "smollm2-135m").is_dir():
        pytest.skip("the demo model is not pulled: mindstream pull smollm2-135m")
    status, report = run("smollm2-135m", tmp_path)
    assert status == 0, report
    assert report.startswith("# mindstream self-test of smollm2-135m: 7 of 7 passed")
    for check in (
        "| versions | ok | mindspore 2.9.0, mindformers 1.9.0 |",
        "| operators | ok | qwen2 on CPU with ",
        "| decode against full prefill | ok | 40 rows",
        "| batched against single | ok | 4 rows",
        "| golden 'Gravity is' | ok |",
        "| golden 'The capital of France is' | ok |",
        "| stream | ok | 8 events",
    ):
        assert check in report
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.md"]  # MindSpore left nothing


def test_a_broken_deployment_says_what_is_wrong(tiny: ModuleType, tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "weights", "tiny-qwen2")
    (folder / "model.safetensors").unlink()
    value = {"use_legacy": False, "context": {"device_target": "CPU"}}
    (folder / "deploy.yaml").write_text(yaml.safe_dump(value))
    status, report = run(str(folder), tmp_path)
    assert status == 1
    assert "1 of 2 passed" in report
    assert (
        f"| operators | FAILED | weight directory {folder} holds no *.safetensors file. |" in report
    )
