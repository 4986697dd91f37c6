"""The self-test's checks of a model, step by step. In a process of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindstream.backends.engine.step_model import Batch, Float32, logits_of
from mindstream.backends.mindspore.config import plan_model
from mindstream.backends.mindspore.step_model import MindSporeStepModel
from mindstream.plugin.backend import Limits
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.tokenizer import open_tokenizer

# Greedy continuations of the demo models by HF transformers in float32.
GOLDENS = {
    "smollm2-135m": {
        "Gravity is": (253, 4959, 1909, 281, 6944, 338, 6601, 260, 26589, 282),
        "The capital of France is": (7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34),
    }
}
# Largest difference of two logits that should be equal, as a share of the logits' standard
# deviation: another summation order in float32, and the same in half precision.
_TOLERANCE = {"float32": 1e-3}
_HALF_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the report."""

    name: str
    passed: bool
    detail: str


def check_model(deployment: Deployment) -> list[Outcome]:
    """Loads the model and runs every check; the first outcome says whether it loaded."""
    began = time.monotonic()
    try:
        plan = plan_model(deployment)
        model = MindSporeStepModel(deployment)
        limits = model.load()
    except ConfigError as error:
        return [Outcome("operators", False, str(error))]
    loaded = (
        f"{plan.family} on {plan.device} with {model.kernels}: {plan.layers} layers compiled in "
        f"{time.monotonic() - began:.1f} s; {limits.num_blocks} KV blocks of {limits.block_size}"
    )
    dtype = str(plan.model_config.get("compute_dtype", ""))
    if model.kernels == "fused":
        dtype = deployment.serving.cpu.weights  # no float32 arithmetic
    trial = _Trial(model, limits.block_size, _TOLERANCE.get(dtype, _HALF_TOLERANCE))
    prompts = _prompts(limits)
    checks: list[Callable[[], list[Outcome]]] = [
        lambda: [trial.decode_against_prefill(prompts[0])],
        lambda: [trial.batched_against_single(prompts)],
        lambda: _goldens(trial, deployment),
    ]
    outcomes = [Outcome("operators", True, loaded)]
    for check in checks:
        try:
            outcomes += check()
        except (RuntimeError, ValueError, TypeError) as error:
            outcomes.append(Outcome("step", False, f"{type(error).__name__}: {error}"))
    model.close()
    return outcomes


def _prompts(limits: Limits) -> list[list[int]]:
    """Up to four random prompts of several lengths that fit into the cache together."""
    random = np.random.RandomState(1)
    most = min(40, limits.max_seq_len - 1, max(1, limits.num_blocks // 4) * limits.block_size)
    lengths = sorted({max(1, min(n, most)) for n in (most, 17, 8, 1)}, reverse=True)
    return [random.randint(0, limits.vocab_size, n).tolist() for n in lengths]


class _Trial:
    """Sequences that own their blocks: sequence i has those from i * width on."""

    def __init__(self, model: MindSporeStepModel, block_size: int, tolerance: float) -> None:
        self._model = model
        self._block_size = block_size
        self._tolerance = tolerance

    def run(self, work: Sequence[tuple[list[int], int, list[int]]], *, rows: bool) -> Float32:
        """(new ids, tokens cached, blocks) a sequence; logits of all rows, or of the last ones."""
        size = self._block_size
        spans = [range(done, done + len(new)) for new, done, _ in work]
        slots = [
            blocks[i // size] * size + i % size
            for span, (_, _, blocks) in zip(spans, work, strict=True)
            for i in span
        ]
        lengths = np.array([len(new) for new, _, _ in work], np.int32)
        width = max(len(blocks) for _, _, blocks in work)
        tables = [blocks + [-1] * (width - len(blocks)) for _, _, blocks in work]
        last = np.cumsum(lengths, dtype=np.int32) - 1
        output = self._model.forward(
            Batch(
                token_ids=np.array([t for new, _, _ in work for t in new], np.int32),
                positions=np.array([i for span in spans for i in span], np.int32),
                slot_mapping=np.array(slots, np.int32),
                q_seq_lens=lengths,
                context_lens=np.array([done for _, done, _ in work], np.int32),
                block_tables=np.array(tables, np.int32),
                logits_rows=np.arange(last[-1] + 1, dtype=np.int32) if rows else last,
            )
        )
        return logits_of(output)

    def blocks(self, index: int, tokens: int) -> list[int]:
        """Enough blocks for sequence `index` of up to `tokens` tokens."""
        need = -(-tokens // self._block_size)
        return list(range(index * need, (index + 1) * need))

    def decode_against_prefill(self, prompt: list[int]) -> Outcome:
        """Half a prompt as one chunk, then a token a step, against all of it at once."""
        blocks = self.blocks(0, len(prompt))
        full = self.run([(prompt, 0, blocks)], rows=True)
        half = max(1, len(prompt) // 2)
        steps = [self.run([(prompt[:half], 0, blocks)], rows=True)]
        steps += [self.run([([prompt[i]], i, blocks)], rows=True) for i in range(half, len(prompt))]
        return self._compare("decode against full prefill", np.concatenate(steps), full)

    def batched_against_single(self, prompts: list[list[int]]) -> Outcome:
        """All prompts in one step, against each alone."""
        longest = max(map(len, prompts))
        alone = [self.run([(p, 0, self.blocks(0, longest))], rows=False)[0] for p in prompts]
        work = [(p, 0, self.blocks(i, longest)) for i, p in enumerate(prompts)]
        together = self.run(work, rows=False)
        return self._compare("batched against single", together, np.stack(alone))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy ids behind the prompt."""
        blocks = self.blocks(0, len(prompt) + count)
        out = [int(self.run([(prompt, 0, blocks)], rows=False)[0].argmax())]
        while len(out) < count:
            step = self.run([([out[-1]], len(prompt) + len(out) - 1, blocks)], rows=False)
            out.append(int(step[0].argmax()))
        return out

    def _compare(self, name: str, got: Float32, expected: Float32) -> Outcome:
        difference = float(np.abs(got - expected).max())
        bound = self._tolerance * float(expected.std())
        agree = float((got.argmax(-1) == expected.argmax(-1)).mean())
        passed = bool(np.isfinite(got).all()) and difference <= bound
        detail = (
            f"{len(got)} rows, largest difference {difference:.2e} (allowed {bound:.2e}), "
            f"{agree:.0%} choose the same token, {'equal' if difference == 0 else 'not equal'} "
            "bit for bit"
        )
        return Outcome(name, passed, detail)


def _goldens(trial: _Trial, deployment: Deployment) -> list[Outcome]:
    """Stored greedy ids; only the demo models have some."""
    outcomes = []
    tokenizer = open_tokenizer(deployment)
    for text, expected in GOLDENS.get(deployment.serving.pull, {}).items():
        found = trial.greedy(list(tokenizer.encode(text)), len(expected))
        passed = tuple(found) == expected
        detail = f"{found}" if passed else f"{found}, expected {list(expected)}"
        outcomes.append(Outcome(f"golden {text!r}", passed, detail))
    return outcomes
