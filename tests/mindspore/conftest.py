"""Models in processes of their own, one of each kind a session, and batches written by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from mindstream.backends.engine.step_model import Batch, Chosen
from mindstream.plugin import paths

GOLDENS = Path(__file__).parents[1] / "goldens"
Sequences = Sequence[tuple[Sequence[int], int, Sequence[int]]]


class Worker:
    """A StepModel in another process."""

    def __init__(self, **env: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **env},
        )
        self.limits: Any = None

    def ask(self, *command: Any) -> tuple[Any, ...]:
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(command, self._process.stdin)
        self._process.stdin.flush()
        try:
            answer: tuple[Any, ...] = pickle.load(self._process.stdout)
        except EOFError:
            _, errors = self._process.communicate()
            raise AssertionError(f"the worker died: {errors.decode()[-2000:]}") from None
        return answer

    def load(self, target: str | Path, **overrides: str) -> Worker:
        """Keyword names are dotted paths with __ for the dots."""
        dotted = {key.replace("__", "."): value for key, value in overrides.items()}
        answer = self.ask("load", str(target), dotted)
        assert answer[0] == "ok", answer
        self.limits = answer[1]
        return self

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        answer = self.ask("forward", batch)
        assert answer[0] == "ok", answer
        logits: NDArray[np.float32] = answer[1]
        return logits

    def step(self, sequences: Sequences, rows: Sequence[int] | None = None) -> NDArray[np.float32]:
        """(new token ids, tokens already cached, blocks) a sequence -> logits of the last rows."""
        return self.forward(make_batch(sequences, self.limits.block_size, rows))

    def greedy_step(
        self, sequences: Sequences, rows: Sequence[int] | None = None
    ) -> list[int] | NDArray[np.float32]:
        """As `step`, where ids are enough: a list of them if the model chose, else logits."""
        batch = replace(make_batch(sequences, self.limits.block_size, rows), greedy=True)
        answer = self.ask("forward", batch)
        assert answer[0] == "ok", answer
        output: Chosen | NDArray[np.float32] = answer[1]
        return output.ids.tolist() if isinstance(output, Chosen) else output

    def watch(
        self, sequences: Sequences, sampled: Sequence[Any], rows: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """See `worker.watch`; `sampled` are SampleRows."""
        answer = self.ask("watch", make_batch(sequences, self.limits.block_size, rows), sampled)
        assert answer[0] == "ok", answer
        found: dict[str, Any] = answer[1]
        return found

    def compiled(self) -> int:
        """Graphs that MindSpore has compiled for the loaded model, by its own record."""
        count: int = self.ask("compiled")[1]
        return count

    def instruction_set(self) -> str:
        """What the compiled kernels run on, before a model is loaded too."""
        name: str = self.ask("instruction_set")[1]
        return name

    def logged(self) -> list[str]:
        """Level and text of each line since the last load began."""
        lines: list[str] = self.ask("logged")[1]
        return lines

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.communicate(timeout=60)


def make_batch(sequences: Sequences, block_size: int, rows: Sequence[int] | None = None) -> Batch:
    """Logits of each sequence's last row, or of `rows`."""
    ids, positions, slots = [], [], []
    for new, done, blocks in sequences:
        where = range(done, done + len(new))
        ids += list(new)
        positions += list(where)
        slots += [blocks[i // block_size] * block_size + i % block_size for i in where]
    lengths = [len(new) for new, _, _ in sequences]
    width = max(len(blocks) for _, _, blocks in sequences)
    tables = [[*blocks, *[-1] * (width - len(blocks))] for _, _, blocks in sequences]
    wanted = np.cumsum(lengths) - 1 if rows is None else rows
    return Batch(
        token_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        q_seq_lens=np.array(lengths, np.int32),
        context_lens=np.array([done for _, done, _ in sequences], np.int32),
        block_tables=np.array(tables, np.int32),
        logits_rows=np.array(wanted, np.int32),
    )


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, GOLDENS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module that writes the small random checkpoints."""
    return _module("tiny_models")


@pytest.fixture(scope="session")
def numpy_decoder() -> ModuleType:
    """The module that computes what a checkpoint means."""
    return _module("numpy_decoder")


@pytest.fixture(scope="session")
def goldens() -> dict[str, Any]:
    """Reference arrays and token ids of HF transformers in float32."""
    found: dict[str, Any] = json.loads((GOLDENS / "goldens.json").read_text())
    with np.load(GOLDENS / "goldens.npz") as arrays:
        found.update({key: arrays[key] for key in arrays})
    return found


def deployment_yaml(**model_config: Any) -> dict[str, Any]:
    """The smallest yaml of a CPU deployment."""
    return {
        "use_legacy": False,
        "run_mode": "predict",
        "model": {"model_config": {"block_size": 4, "num_blocks": 64, **model_config}},
        "context": {"mode": 0, "device_target": "CPU"},
    }


@pytest.fixture(scope="session")
def tiny_deployment(
    tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Writes a small checkpoint with its yaml beside it; gives the weight directory."""

    def write(name: str, dtype: str = "F32", shards: int = 1, **changes: Any) -> Path:
        folder: Path = tiny.write_model(
            tmp_path_factory.mktemp(name) / name, name, dtype, shards, **changes
        )
        (folder / "deploy.yaml").write_text(yaml.safe_dump(deployment_yaml()))
        return folder

    return write


@pytest.fixture(scope="session")
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Starts workers, with these environment variables, and ends them with the session."""
    workers: list[Worker] = []

    def start(**env: str) -> Worker:
        workers.append(Worker(**env))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture(scope="session")
def lab(start_worker: Callable[..., Worker]) -> Worker:
    """One process for the small models, which are loaded into it one after the other."""
    return start_worker()


@pytest.fixture(scope="session")
def demo(start_worker: Callable[..., Worker]) -> Worker:
    """The demo model with float32 weights, by the kernels that `auto` chooses here."""
    if not (paths.models_dir() / "smollm2-135m").is_dir():
        pytest.skip("the demo model is not pulled: mindstream pull smollm2-135m")
    return start_worker().load("smollm2-135m", cpu__weights="f32")
