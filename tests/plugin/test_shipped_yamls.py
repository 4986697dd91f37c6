"""MindFormers itself reads the shipped deployments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindstream.plugin.model_config import load_deployment, shipped_names

SCRIPT = """
import json, sys
from mindformers import MindFormerConfig
found = {}
for file in sys.argv[1:]:
    config = MindFormerConfig(file)
    found[file] = [config.use_legacy, config.context.device_target, config.serving.name]
print("\\n" + json.dumps(found))
"""


@pytest.mark.model
def test_mindformers_reads_them(tmp_path: Path) -> None:
    deployments = {str(d.path): d for d in map(load_deployment, shipped_names()) if d.mindformers}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *deployments],
        cwd=tmp_path,  # MindFormers writes an output folder where it runs
        env={**os.environ, "RUN_MODE": "predict"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        file: [False, deployment.mindformers["context"]["device_target"], deployment.name]
        for file, deployment in deployments.items()
    }
