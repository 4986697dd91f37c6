"""mindstream beside other CPU servers: the same weights, the same prompts, taking turns.

usage: run.py [--deployment smollm2-135m] [--streams 1 8 32] [--rounds 3] [--json FILE]

OpenVINO GenAI is installed into an environment of its own under --work-dir, where the peers' model
files are made too. llama.cpp and vLLM take part if --llama-server and --vllm-python name them, or
if llama-server is on the PATH. Every figure is the median of the rounds; ours are compared with the
best peer of the row. Needs the pull extra (gguf). Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import prompts as words  # noqa: E402 - the path is set above
from contenders import (  # noqa: E402
    Contender,
    LlamaCpp,
    Mindstream,
    OpenVino,
    Prompt,
    Result,
    Vllm,
    install_openvino,
)

from mindstream.plugin.model_config import load_deployment  # noqa: E402

_NEW_TOKENS = 64
_OWN = {
    "mindstream bf16": ["cpu.kernels=fused", "cpu.weights=bf16"],
    "mindstream int8": ["cpu.kernels=fused", "cpu.weights=int8"],
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; writes all rounds to --json."""
    options = _options().parse_args(arguments)
    work_dir = Path(options.work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    contenders: list[Contender] = []
    try:
        for name, overrides in _OWN.items():
            contenders.append(Mindstream(name, options.deployment, overrides))
        _add_peers(contenders, options, work_dir)
        rounds = _measure(contenders, options)
    finally:
        for contender in contenders:
            contender.close()
    table = _table(rounds, options.streams)
    print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(rounds, indent=1))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--deployment", default="smollm2-135m", help="a CPU deployment")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", default=str(Path.home() / ".cache" / "mindstream-peers"))
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--json", help="file for every measured value")
    return parser


def _add_peers(found: list[Contender], options: argparse.Namespace, work_dir: Path) -> None:
    model_dir = load_deployment(options.deployment).model_dir
    if model_dir is None:
        raise SystemExit(f"{options.deployment} names no weight directory")
    f16 = _gguf(model_dir, work_dir, "f16")
    found.append(OpenVino(install_openvino(work_dir), f16))
    if options.llama_server:
        bf16 = _gguf(model_dir, work_dir, "bf16")
        found.append(LlamaCpp(Path(options.llama_server), bf16, max(options.streams)))
    if options.vllm_python:
        found.append(Vllm(Path(options.vllm_python), model_dir))


def _gguf(model_dir: Path, work_dir: Path, kind: str) -> Path:
    out = work_dir / f"{model_dir.name}-{kind}.gguf"
    if not out.exists():
        command = [sys.executable, str(HERE / "make_gguf.py"), str(model_dir), str(out), kind]
        subprocess.run(command, check=True)
    return out


def _measure(contenders: Sequence[Contender], options: argparse.Namespace) -> dict[str, Any]:
    """{contender: {row: [value a round]}}; every round runs each contender once a row."""
    values: dict[str, Any] = {contender.name: {} for contender in contenders}
    seed = 0

    def take(row: str, count: int, size: int, new: int) -> None:
        nonlocal seed
        seed += 1
        batch = [_prompt(options.deployment, size, seed * 1000 + i) for i in range(count)]
        for contender in contenders:
            result: Result = contender.run(batch, new)
            value = result.ttft if new == 1 else result.rate
            values[contender.name].setdefault(row, []).append(value)

    for contender in contenders:  # warm up: graphs, caches, thread pools
        contender.run([_prompt(options.deployment, 20, 0)], 8)
    for _ in range(options.rounds):
        for streams in options.streams:
            take(f"tokens/s, {streams} streams", streams, 100, _NEW_TOKENS)
        take("TTFT ms, 100 words", 1, 100, 1)
        take("TTFT ms, 1,500 tokens", 1, 1450, 1)
    return values


def _prompt(deployment: str, size: int, seed: int) -> Prompt:
    text = words.of_words(size, seed)
    return Prompt(text, _tokenizer(deployment).encode(text).ids)


_tokenizers: dict[str, Any] = {}


def _tokenizer(deployment: str) -> Any:
    if deployment not in _tokenizers:
        from tokenizers import Tokenizer

        model_dir = load_deployment(deployment).model_dir
        _tokenizers[deployment] = Tokenizer.from_file(str(Path(str(model_dir)) / "tokenizer.json"))
    return _tokenizers[deployment]


def _table(values: dict[str, Any], streams: Sequence[int]) -> str:
    """Markdown; the last columns compare each of ours with the best peer."""
    rows = list(next(iter(values.values())))
    peers = [name for name in values if name not in _OWN]
    lines = ["| | " + " | ".join([*values, *(f"{own} / best peer" for own in _OWN)]) + " |"]
    lines.append("|" + "---|" * (1 + len(values) + len(_OWN)))
    for row in rows:
        late = row.startswith("TTFT")
        median = {name: statistics.median(values[name][row]) for name in values}
        best = (min if late else max)(median[name] for name in peers)
        shown = [f"{v * 1e3:.0f}" if late else f"{v:.0f}" for v in median.values()]
        ratios = [f"{median[own] / best:.2f}x" for own in _OWN]
        lines.append(f"| {row} | " + " | ".join([*shown, *ratios]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
