"""Who takes part: each starts, answers batches of prompts, and ends. Nothing is compared here.

mindstream and OpenVINO; the servers of others are in http_peers.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from load_client import Target, closed_loop
from server_process import serve

HERE = Path(__file__).parent
OPENVINO_VERSION = "2026.4.0"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt as text and as token ids."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Result:
    """A batch of prompts, all started together. The counts are the contender's own."""

    prompt_tokens: int  # computed, not found in a cache
    tokens: int
    seconds: float
    ttft: float  # of the first token to arrive
    decode_seconds: float  # from the first token to arrive to the last; nan if unknown

    @property
    def rate(self) -> float:
        """New tokens a second, the time of the prompts included."""
        return self.tokens / self.seconds


class Contender(Protocol):
    """`name` appears in the table."""

    name: str

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> Result: ...

    def close(self) -> None: ...


def threads() -> int:
    """Of every contender: one a core."""
    return len(os.sched_getaffinity(0))


class Mindstream:
    """This project, through its stream endpoint. `vocab_size`: the first id that no model gives."""

    def __init__(
        self, name: str, deployment: str, vocab_size: int, overrides: Sequence[str]
    ) -> None:
        self.name = name
        self._stack = ExitStack()
        # The dialect has no ignore_eos: an end of text that cannot be drawn is none.
        settings = [f"generation_config.eos_token_id={vocab_size}", f"cpu.threads={threads()}"]
        self._server = self._stack.enter_context(serve(deployment, [*settings, *overrides]))
        self._target = Target.of(self._server.url, self._server.model)
        self._prompt_tokens = self._counted_prompt_tokens()

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> Result:
        requests = [self._target.request(prompt.text, new_tokens) for prompt in prompts]
        outcomes, seconds = asyncio.run(closed_loop(self._target, requests, len(requests)))
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            raise RuntimeError(f"{self.name}: {errors[0]}")
        first = min(outcome.arrivals[0] for outcome in outcomes)
        last = max(outcome.arrivals[-1] for outcome in outcomes)
        before, self._prompt_tokens = self._prompt_tokens, self._counted_prompt_tokens()
        return Result(
            prompt_tokens=self._prompt_tokens - before,
            tokens=sum(outcome.tokens for outcome in outcomes),
            seconds=seconds,
            ttft=min(outcome.ttft for outcome in outcomes),
            decode_seconds=last - first,
        )

    def close(self) -> None:
        self._stack.close()

    def _counted_prompt_tokens(self) -> int:
        """Of the server's metrics: prompt tokens computed since it started."""
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.partition("{")[0].endswith("prompt_tokens_total")]
        return int(float(found[0].rsplit(" ", 1)[1]))


class OpenVino:
    """OpenVINO GenAI in process: no HTTP, no text. `model`: a GGUF file or an exported IR."""

    def __init__(self, name: str, python: Path, model: Path) -> None:
        self.name = name
        command = [str(python), str(HERE / "openvino_worker.py"), str(model), str(threads())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.settings = self._answer()

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> Result:
        ids = [prompt.ids for prompt in prompts]
        return Result(**self._ask({"prompts": ids, "new": new_tokens}))

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")


def install_openvino(work_dir: Path) -> Path:
    """A virtual environment with the pinned OpenVINO GenAI; made once. The path of its Python."""
    python = work_dir / "openvino" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        wanted = [f"{name}=={OPENVINO_VERSION}" for name in ("openvino", "openvino-genai")]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True)
    return python
