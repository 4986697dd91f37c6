"""Who takes part: each starts, answers batches of prompts, and ends. Nothing is measured here."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from load_client import Target, closed_loop
from server_process import serve
from sse_client import together

HERE = Path(__file__).parent
_READY_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt as text and as token ids."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Result:
    """A batch of prompts, all started together."""

    tokens: int
    seconds: float
    ttft: float  # of the first token to arrive

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return self.tokens / self.seconds


class Contender(Protocol):
    """`name` appears in the table."""

    name: str

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> Result: ...

    def close(self) -> None: ...


class Mindstream:
    """This project, through its stream endpoint."""

    def __init__(self, name: str, deployment: str, overrides: Sequence[str]) -> None:
        self.name = name
        self._stack = ExitStack()
        server = self._stack.enter_context(serve(deployment, overrides))
        self._target = Target.of(server.url, server.model)

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> Result:
        requests = [self._target.request(prompt.text, new_tokens) for prompt in prompts]
        outcomes, seconds = asyncio.run(closed_loop(self._target, requests, len(requests)))
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            raise RuntimeError(f"{self.name}: {errors[0]}")
        tokens = sum(outcome.tokens for outcome in outcomes)
        return Result(tokens, seconds, min(outcome.ttft for outcome in outcomes))

    def close(self) -> None:
        self._stack.close()


class OpenVino:
    """OpenVINO GenAI in process: no HTTP, no text. Its first token is a run of its own."""

    name = "OpenVINO GenAI, in process"

    def __init__(self, python: Path, model: Path) -> None:
        worker = HERE / "openvino_worker.py"
        self._process = subprocess.Popen(
            [str(python), str(worker), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()["ready"]

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> Result:
        ids = [prompt.ids for prompt in prompts]
        if new_tokens == 1:
            answer = self._ask({"prompts": ids, "new": 1})
            return Result(len(ids), answer["seconds"], answer["seconds"])
        answer = self._ask({"prompts": ids, "new": new_tokens})
        return Result(int(answer["tokens"]), answer["seconds"], float("nan"))

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _ask(self, request: dict[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")


class HttpPeer:
    """A server with one server-sent event a token."""

    def __init__(self, name: str, command: Sequence[str], health: str, path: str) -> None:
        self.name = name
        self._path = path
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        filled = [part.replace("PORT", str(self._port)) for part in command]
        self._process = subprocess.Popen(
            filled, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait(health)

    def _body(self, prompt: Prompt, new_tokens: int) -> dict[str, object]:
        raise NotImplementedError

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> Result:
        bodies = [self._body(prompt, new_tokens) for prompt in prompts]
        _, seconds, ttft = asyncio.run(together(self._port, self._path, bodies))
        return Result(new_tokens * len(prompts), seconds, ttft)  # they ignore the end of text

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _wait(self, health: str) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with status {self._process.returncode}")
            try:
                url = f"http://127.0.0.1:{self._port}{health}"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise RuntimeError(f"{self.name} was not ready after {_READY_SECONDS} s")


class LlamaCpp(HttpPeer):
    """llama.cpp's server on a bf16 GGUF."""

    def __init__(self, binary: Path, model: Path, slots: int) -> None:
        threads = str(len(os.sched_getaffinity(0)))
        command = [str(binary), "-m", str(model), "--port", "PORT", "--host", "127.0.0.1"]
        command += ["-t", threads, "-tb", threads, "-np", str(slots), "-c", str(2048 * slots)]
        super().__init__("llama.cpp server", command, "/health", "/completion")

    def _body(self, prompt: Prompt, new_tokens: int) -> dict[str, object]:
        return {
            "prompt": prompt.ids,
            "n_predict": new_tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
        }


class Vllm(HttpPeer):
    """vLLM's CPU build, from the Python of an environment that has it."""

    def __init__(self, python: Path, model_dir: Path) -> None:
        self._model = str(model_dir)
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model"]
        command += [self._model, "--dtype", "bfloat16", "--port", "PORT", "--max-model-len", "2048"]
        super().__init__("vLLM CPU", command, "/health", "/v1/completions")

    def _body(self, prompt: Prompt, new_tokens: int) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": prompt.ids,
            "max_tokens": new_tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }


def install_openvino(work_dir: Path) -> Path:
    """A virtual environment with the pinned OpenVINO GenAI; made once. The path of its Python."""
    python = work_dir / "openvino" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        wanted = [f"{name}==2026.4.0" for name in ("openvino", "openvino-genai")]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], check=True)
    return python
