"""Servers of others that stream one server-sent event a token: llama.cpp and vLLM."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import Prompt, Result, threads
from sse_client import Streamed, together

_READY_SECONDS = 900
# Where Debian puts it; vLLM's documentation recommends it, and Intel's OpenMP.
_TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")


class HttpPeer:
    """A server process. `log` takes what it prints."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        path: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._path = path
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        filled = [part.replace("PORT", str(self._port)) for part in command]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                filled, stdout=output, stderr=output, env={**os.environ, **(environment or {})}
            )
        self._log = log
        self._wait()

    def _body(self, prompt: Prompt, new_tokens: int) -> dict[str, object]:
        raise NotImplementedError

    def _counts(self, events: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """(prompt tokens computed, new tokens) of one stream's last events."""
        raise NotImplementedError

    def run(self, prompts: Sequence[Prompt], new_tokens: int) -> Result:
        bodies = [self._body(prompt, new_tokens) for prompt in prompts]
        streams, seconds = asyncio.run(together(self._port, self._path, bodies))
        counts = [self._counts(stream.last_events) for stream in streams]
        return Result(
            prompt_tokens=sum(prompt for prompt, _ in counts),
            tokens=sum(new for _, new in counts),
            seconds=seconds,
            ttft=min(stream.first - stream.began for stream in streams),
            decode_seconds=_last(streams) - min(stream.first for stream in streams),
        )

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(
                    f"{self.name} ended with status {self._process.returncode}:\n{tail}"
                )
            try:
                url = f"http://127.0.0.1:{self._port}/health"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        self.close()
        raise RuntimeError(f"{self.name} was not ready after {_READY_SECONDS} s; see {self._log}")


def _last(streams: Sequence[Streamed]) -> float:
    return max(stream.last for stream in streams)


class LlamaCpp(HttpPeer):
    """llama.cpp's server on a GGUF file; no prompt is kept for a later one."""

    def __init__(self, name: str, binary: Path, model: Path, slots: int, log: Path) -> None:
        count = str(threads())
        command = [str(binary), "-m", str(model), "--port", "PORT", "--host", "127.0.0.1"]
        command += ["-t", count, "-tb", count, "-np", str(slots), "-c", str(2048 * slots)]
        # Read, not mapped: decoded 13 % faster here, perhaps for the page cache's small pages.
        command += ["--no-cache-prompt", "--cache-ram", "0", "--load-mode", "none"]
        super().__init__(name, command, "/completion", log)

    def _body(self, prompt: Prompt, new_tokens: int) -> dict[str, object]:
        return {
            "prompt": prompt.ids,
            "n_predict": new_tokens,
            "stream": True,
            "ignore_eos": True,
            # Greedy without the default chain of samplers, which sorts the vocabulary.
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
        }

    def _counts(self, events: Sequence[dict[str, Any]]) -> tuple[int, int]:
        end = events[-1]
        return end["timings"]["prompt_n"], end["tokens_predicted"]


class Vllm(HttpPeer):
    """vLLM's CPU build, from the Python of an environment that has it.

    As its documentation advises: tcmalloc and Intel's OpenMP where they are installed, threads
    bound to cores. It also advises to leave a core to the server, which two cores cannot.
    """

    def __init__(self, python: Path, model_dir: Path, log: Path) -> None:
        self._model = str(model_dir)
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", self._model]
        command += ["--dtype", "bfloat16", "--port", "PORT", "--host", "127.0.0.1"]
        command += ["--max-model-len", "2048", "--no-enable-prefix-caching"]
        preload = [_TCMALLOC, python.parents[1] / "lib" / "libiomp5.so"]
        environment = {
            "LD_PRELOAD": ":".join(str(library) for library in preload if library.exists()),
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__("vLLM CPU", command, "/v1/completions", log, environment)

    def _body(self, prompt: Prompt, new_tokens: int) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": prompt.ids,
            "max_tokens": new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0,
        }

    def _counts(self, events: Sequence[dict[str, Any]]) -> tuple[int, int]:
        usage = events[-1]["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]
