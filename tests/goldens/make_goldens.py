"""Makes goldens.npz and goldens.json: what HF transformers computes in float32.

Not run by the tests. In an environment with torch (CPU) and transformers 4.57:

    python make_goldens.py <weight directory of smollm2-135m>
"""

# torch is not installed with mindstream:
# mypy: ignore-errors

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from tiny_models import MODELS, PROMPT, write_model

HERE = Path(__file__).parent
PROMPTS = {"gravity": "Gravity is", "france": "The capital of France is"}
# Logits are stored for every 16th id and for the likeliest ones.
STRIDE, TOP = 16, 64


def main(demo: Path) -> None:
    """Writes the two files beside this script."""
    torch.manual_seed(0)
    arrays: dict[str, np.ndarray] = {}
    texts: dict[str, object] = {
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__}
    }
    model = load(demo)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    for key, text in PROMPTS.items():
        prompt = tokenizer(text)["input_ids"]
        out = list(prompt)
        for step in range(10):
            logits = run(model, out)[-1]
            if step == 0:
                top = np.argsort(logits)[-TOP:]
                ids = np.union1d(np.arange(0, logits.size, STRIDE), top).astype(np.int32)
                arrays[f"{key}_ids"], arrays[f"{key}_logits"] = ids, logits[ids]
            out.append(int(logits.argmax()))
        texts[key] = {"text": text, "prompt_ids": prompt, "greedy_ids": out[len(prompt) :]}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), name)
            arrays[name] = run(load(Path(folder)), PROMPT)
    np.savez_compressed(HERE / "goldens.npz", **arrays)
    (HERE / "goldens.json").write_text(json.dumps(texts, indent=2) + "\n")


def load(folder: Path) -> torch.nn.Module:
    """The checkpoint in float32, with plain attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def run(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Logits [len(ids), vocab] of one full prefill."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
