"""Compiled graphs on disk, so that a second start takes seconds.

MindSpore numbers the graphs in the order in which the process compiles them and trusts what it
finds. So a folder belongs to one plan, only the first model of a process uses one, and a folder
that an interrupted start left behind is emptied.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindstream.backends.mindspore.config import ModelPlan
from mindstream.backends.mindspore.cpu.library import library_path
from mindstream.backends.mindspore.environment import SUPPORTED
from mindstream.plugin.paths import cache_dir

_used = False  # by a model of this process


def folder(plan: ModelPlan, kernels: str) -> Path:
    """<cache>/graphs/<digest of the configuration, the versions and mindstream's own cells>."""
    digest = hashlib.sha256(json.dumps([SUPPORTED, kernels, plan.device]).encode())
    digest.update(json.dumps(dict(plan.model_config), sort_keys=True, default=str).encode())
    digest.update(str(library_path()).encode())  # it stands in the compiled graphs
    here = Path(__file__).parent
    for source in sorted([here / "graphs.py", *(here / "cpu").glob("*.py")]):
        digest.update(source.read_bytes())
    return cache_dir() / "graphs" / digest.hexdigest()[:24]


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """While it is open, MindSpore keeps its graphs in `path`; complete if that ended well."""
    global _used
    if _used:
        yield
        return
    _used = True
    path.mkdir(parents=True, exist_ok=True)
    complete = path / "complete"
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            for left in path.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
        os.environ["MS_COMPILER_CACHE_PATH"] = str(path)
        os.environ["MS_COMPILER_CACHE_ENABLE"] = "1"
        try:
            yield
        finally:
            os.environ["MS_COMPILER_CACHE_ENABLE"] = "0"
        complete.touch()
