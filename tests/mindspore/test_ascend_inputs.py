"""What the two Ascend graphs are handed, as MindFormers' own generator hands it to them.

No NPU is needed: the model is a recorder. What the graphs make of it, `mindstream selftest` shows
on the device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.model

PROGRAM = """
import json, sys
from types import SimpleNamespace
import numpy as np
import mindspore as ms
from mindstream.backends.engine.step_model import Batch
from mindstream.backends.mindspore.graphs import Graphs

ms.set_device("CPU")
NAMES = ("input_ids hidden_states positions batch_valid_length context_lens_tensor q_seq_lens "
         "block_tables slot_mapping attention_mask attn_metadata attn_padding_idx "
         "attn_unpadding_idx ffn_padding_idx ffn_unpadding_idx key_cache value_cache").split()
seen = []

class Recorder:
    compute_dtype = getattr(ms, sys.argv[1])
    phase = ""
    def __init__(self):
        self.model = SimpleNamespace(return_hidden_states=False, decoder=ms.nn.Cell(),
                                     output_layer=ms.nn.Dense(4, 8))
    def set_dynamic_inputs(self):
        self.dynamic = True
    def get_inputs(self):
        return (None,) * 16
    def add_flags_custom_mcore(self, is_prefill):
        self.is_prefill = is_prefill
    def __call__(self, *inputs):
        given = dict(zip(NAMES, inputs, strict=True))
        caches = given.pop("key_cache"), given.pop("value_cache")
        values = {n: None if v is None else v.float().asnumpy().tolist() if n == "attention_mask"
                  else v.asnumpy().tolist() for n, v in given.items()}
        dtypes = sorted({str(v.dtype) for n, v in given.items()
                         if v is not None and n != "attention_mask"})
        seen.append({"phase": self.phase, "is_prefill": self.is_prefill, "dtypes": dtypes,
                     "mask_dtype": str(given["attention_mask"].dtype),
                     "cache": [[list(t.shape) for t in c] for c in caches], **values})
        return ms.Tensor(np.zeros((len(values["input_ids"]), 4), np.float32))

plan = SimpleNamespace(device="Ascend", hidden=4, vocab=8, block_size=2)
graphs = Graphs(Recorder(), plan, [(6, 2, 1, 4)] * 3)
i = lambda *values: np.array(values, np.int32)
steps = [
    # two fresh prompts; two decodes; a decode beside a chunk
    Batch(i(1, 2, 3, 4), i(0, 1, 2, 0), i(0, 1, 2, 8), i(3, 1), i(0, 0), i([0, 1], [4, -1]), i()),
    Batch(i(5, 6), i(3, 1), i(3, 9), i(1, 1), i(3, 1), i([0, 1], [4, -1]), i()),
    Batch(i(7, 8, 9), i(4, 2, 3), i(4, 10, 11), i(1, 2), i(4, 2), i([0, 1, 2], [4, 5, -1]), i()),
]
for step in steps:
    graphs.run(step)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def calls(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """(compute dtype, what the model was called with in each of the three steps)."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, request.param], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, json.loads(done.stdout.splitlines()[-1])


def test_fresh_prompts_run_the_prefill_graph(calls: tuple[str, list[dict[str, Any]]]) -> None:
    _, (fresh, decodes, mixed) = calls
    assert [c["phase"] for c in (fresh, decodes, mixed)] == ["prefill", "increment", "increment"]
    assert [c["is_prefill"] for c in (fresh, decodes, mixed)] == [True, False, False]
    assert fresh["batch_valid_length"] == [3, 1] and fresh["q_seq_lens"] == [3, 1]
    assert mixed["batch_valid_length"] == [5, 4] and mixed["context_lens_tensor"] == [4, 2]
    assert mixed["block_tables"] == [[0, 1, 2], [4, 5, -1]]
    for call in (fresh, decodes, mixed):
        assert call["dtypes"] == ["Int32"]
        assert call["cache"] == [[[6, 2, 1, 4]] * 3] * 2
        assert call["hidden_states"] is None and call["attn_metadata"] is None


def test_masks(calls: tuple[str, list[dict[str, Any]]]) -> None:
    dtype, (fresh, decodes, mixed) = calls
    prefill = fresh["attention_mask"]
    assert (len(prefill), len(prefill[0])) == (128, 128)
    hidden = 1.0 if dtype == "bfloat16" else -10000.0
    assert prefill[5][:6] == [0.0] * 6 and prefill[5][6:] == [hidden] * 122
    # No row of a pure decode may look ahead, so there is nothing to mask.
    assert decodes["attention_mask"] == [[0.0]]
    shut = pytest.approx(-10000.0, rel=0.01)  # bfloat16 rounds it
    assert mixed["attention_mask"] == [
        [0.0, 0.0, 0.0, 0.0, 0.0, shut],
        [0.0, 0.0, 0.0, shut, shut, shut],
        [0.0, 0.0, 0.0, 0.0, shut, shut],
    ]
