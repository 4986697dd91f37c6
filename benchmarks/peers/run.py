"""mindstream beside other CPU servers: the same weights, the same prompts, taking turns.

usage: run.py [--deployment smollm2-135m | --model random-qwen3-0.6b] [--streams 1 8 32]
              [--rounds 3] [--llama-server FILE] [--vllm-python FILE] [--openvino-model DIR]
              [--json FILE]

OpenVINO GenAI is installed into an environment of its own under --work-dir, where the peers' model
files are made too. llama.cpp and vLLM take part if --llama-server and --vllm-python name them, or
if llama-server is on the PATH. Every figure is the median of the rounds; ours are compared with the
best peer of the row. Needs the pull extra (gguf). Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import random_model  # noqa: E402 - the path is set above
import table  # noqa: E402
from contenders import (  # noqa: E402
    OPENVINO_VERSION,
    Contender,
    Mindstream,
    OpenVino,
    install_openvino,
    threads,
)
from http_peers import LlamaCpp, Vllm  # noqa: E402
from rounds import Rounds, as_json  # noqa: E402

from mindstream.backends.mindspore.config import read_config_json  # noqa: E402
from mindstream.plugin.model_config import load_deployment  # noqa: E402
from mindstream.plugin.tokenizer import open_tokenizer  # noqa: E402

_OWN = {"mindstream bf16": "bf16", "mindstream int8": "int8"}  # name to kind of weights
_PEERS = ("openvino", "llama.cpp", "vllm")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; writes all rounds to --json."""
    options = _options().parse_args(arguments)
    work_dir = Path(options.work_dir).absolute()
    work_dir.mkdir(parents=True, exist_ok=True)
    if options.model:
        options.deployment = str(random_model.make(options.model, work_dir))
    deployment = load_deployment(options.deployment)
    if deployment.model_dir is None:
        raise SystemExit(f"{options.deployment} names no weight directory")
    contenders: list[Contender] = []
    try:
        _start(contenders, options, deployment.model_dir, work_dir)
        rounds = Rounds(contenders, open_tokenizer(deployment).encode)
        rounds.run(options.rounds, options.streams, long=not options.no_long_prompt)
    finally:
        for contender in contenders:
            contender.close()
    own = {name: kind for name, kind in _OWN.items() if name in rounds.values}
    print(table.comparison(rounds.values, own))
    print()
    print(table.bandwidth_use(rounds.values, rounds.machine, own, deployment.model_dir))
    if options.json:
        Path(options.json).write_text(as_json(rounds, _about(options)))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--deployment", default="smollm2-135m", help="a CPU deployment")
    what.add_argument(
        "--model", choices=sorted(random_model.MODELS), help="a model of random weights, made once"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", default=str(Path.home() / ".cache" / "mindstream-peers"))
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument(
        "--llama-weights",
        choices=["bf16", "f16"],
        nargs="+",
        default=["bf16"],
        help="a server each",
    )
    parser.add_argument("--openvino-model", help="the same model exported by optimum-intel as well")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM's CPU build")
    parser.add_argument(
        "--without", choices=_PEERS, nargs="+", default=[], help="peers to leave out"
    )
    parser.add_argument("--no-long-prompt", action="store_true", help="leaves out 1,500 tokens")
    parser.add_argument("--json", help="file for every measured value")
    return parser


def _start(
    found: list[Contender], options: argparse.Namespace, model_dir: Path, work_dir: Path
) -> None:
    """Appends who takes part, each ready."""
    vocab_size = read_config_json(model_dir)["vocab_size"]
    for name, kind in _OWN.items():
        overrides = ["cpu.kernels=fused", f"cpu.weights={kind}"]
        found.append(Mindstream(name, options.deployment, vocab_size, overrides))
    if "openvino" not in options.without:
        model = _gguf(model_dir, work_dir, "f16")
        python = install_openvino(work_dir)
        found.append(OpenVino("OpenVINO GenAI, in process", python, model))
        if options.openvino_model:
            ir = Path(options.openvino_model).absolute()
            found.append(OpenVino("OpenVINO GenAI, exported IR", python, ir))
    if options.llama_server and "llama.cpp" not in options.without:
        for kind in options.llama_weights:
            model, log = _gguf(model_dir, work_dir, kind), work_dir / f"llama-server-{kind}.log"
            name, binary = f"llama.cpp server {kind}", Path(options.llama_server)
            found.append(LlamaCpp(name, binary, model, max(options.streams), log))
    if options.vllm_python and "vllm" not in options.without:
        found.append(Vllm(Path(options.vllm_python), model_dir, work_dir / "vllm.log"))


def _gguf(model_dir: Path, work_dir: Path, kind: str) -> Path:
    out = work_dir / f"{model_dir.name}-{kind}.gguf"
    if not out.exists():
        part = out.with_suffix(".part")
        command = [sys.executable, str(HERE / "make_gguf.py"), str(model_dir), str(part), kind]
        subprocess.run(command, check=True)
        part.rename(out)
    return out


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "deployment": options.model or options.deployment,
        "rounds": options.rounds,
        "threads": threads(),
        "openvino": OPENVINO_VERSION,
    }


if __name__ == "__main__":
    main()
