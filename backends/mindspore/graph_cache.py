"""Compiled graphs on disk, so that a second start takes seconds.

MindSpore numbers the graphs in the order they are compiled, so a folder belongs to one plan; and it
trusts what it finds, so a folder that an interrupted start left behind is emptied first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindstream.backends.mindspore.config import ModelPlan
from mindstream.backends.mindspore.environment import SUPPORTED
from mindstream.plugin.paths import cache_dir


def folder(plan: ModelPlan, kernels: str) -> Path:
    """<cache>/graphs/<digest of the configuration, the versions and mindstream's own cells>."""
    digest = hashlib.sha256(json.dumps([SUPPORTED, kernels, plan.device]).encode())
    digest.update(json.dumps(dict(plan.model_config), sort_keys=True, default=str).encode())
    here = Path(__file__).parent
    for source in sorted([here / "graphs.py", *(here / "cpu").glob("*.py")]):
        digest.update(source.read_bytes())
    return cache_dir() / "graphs" / digest.hexdigest()[:24]


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Holds the folder while graphs are compiled or read; marks it complete if that ends well."""
    path.mkdir(parents=True, exist_ok=True)
    complete = path / "complete"
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            for left in path.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
        yield
        complete.touch()
