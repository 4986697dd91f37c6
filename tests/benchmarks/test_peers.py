"""The comparison with other servers compares like with like: weights, prompts, counts of tokens."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindstream.backends.mindspore import weights
from mindstream.backends.mindspore.config import plan_model
from mindstream.plugin.model_config import load_deployment

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 40,
}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of benchmarks/peers/, which are scripts and not a package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "peers"))
    return importlib.import_module


@pytest.fixture
def small_model(peers: Any, tmp_path: Path) -> Path:
    """A random model of small sizes, over a tokenizer of six tokens."""
    random_model = peers("random_model")
    source = tmp_path / "source"
    source.mkdir()
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate("abcdef")}, "merges": []}
    (source / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    (source / "tokenizer_config.json").write_text("{}")
    config = {**random_model.MODELS["random-qwen3-0.6b"], **SMALL}
    random_model.write(tmp_path / "small", config, source)
    return tmp_path / "small"


def from_bfloat16(bits: Any) -> Any:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def test_the_random_model_is_a_checkpoint_that_mindstream_takes(small_model: Path) -> None:
    plan = plan_model(load_deployment(small_model))
    weights.check(weights.read_headers(small_model), plan)
    assert (plan.family, plan.tied, plan.head_dim, plan.vocab) == ("qwen3", True, 32, 40)
    vocab = json.loads((small_model / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(40))


def test_the_random_weights_are_the_same_every_time(
    peers: Any, small_model: Path, tmp_path: Path
) -> None:
    config = json.loads((small_model / "config.json").read_text())
    peers("random_model").write(tmp_path / "again", config, tmp_path / "source")
    first, second = (tmp_path / name / "model.safetensors" for name in ("small", "again"))
    assert first.read_bytes() == second.read_bytes()


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even(peers: Any) -> None:
    bfloat16 = peers("random_model").bfloat16
    step = 2.0**-7  # between neighbours in [1, 2)
    values = [1.0, 1 + step / 2, 1 + 3 * step / 2, 1 + 0.51 * step, -1 - 0.49 * step]
    expected = [1.0, 1.0, 1 + 2 * step, 1 + step, -1.0]
    assert from_bfloat16(bfloat16(np.array(values, np.float32))).tolist() == expected


def test_the_peers_file_holds_the_same_weights(
    peers: Any, small_model: Path, tmp_path: Path
) -> None:
    import gguf
    from safetensors import safe_open

    make_gguf = peers("make_gguf")
    out = tmp_path / "small.gguf"
    make_gguf.write(small_model, out, "bf16")
    reader = gguf.GGUFReader(out)
    found = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.get_field("general.architecture")
    assert architecture is not None and architecture.contents() == "qwen3"
    entries = weights.read_headers(small_model)
    assert len(found) == len(entries)
    assert "blk.1.attn_q_norm.weight" in found and "blk.1.attn_k_norm.weight" in found
    raw = (small_model / "model.safetensors").read_bytes()
    for name, entry in entries.items():
        count = int(np.prod(entry.shape))
        stored = from_bfloat16(np.frombuffer(raw, "<u2", count, entry.offset)).reshape(entry.shape)
        tensor = found[make_gguf.gguf_name(name)]
        data = np.asarray(tensor.data)
        if data.dtype != np.float32:
            data = from_bfloat16(data.view(np.uint16))
        # Also the rows of the query and key projections: Qwen3's are rotated as in the checkpoint.
        np.testing.assert_array_equal(data.reshape(entry.shape), stored, err_msg=name)
    with safe_open(small_model / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(entries)


def test_the_bytes_of_a_token_are_those_of_all_matrices_and_the_cache(peers: Any) -> None:
    random_model, table = peers("random_model"), peers("table")
    config = random_model.MODELS["random-qwen3-0.6b"]
    shapes = [shape for _, shape in random_model.tensor_shapes(config)]
    matrices = sum(int(np.prod(shape)) for shape in shapes if len(shape) == 2)
    assert matrices == pytest.approx(596e6, rel=0.001)
    cache = 28 * 8 * 128 * 2 * 2  # bytes a token
    assert table.bytes_a_token(config, "bf16", 0) == 2 * matrices
    assert table.bytes_a_token(config, "bf16", 100) == 2 * matrices + 100 * cache


class Scripted:
    """A contender whose answers are chosen."""

    def __init__(self, peers: Any, name: str, cached: int = 0, missing: int = 0) -> None:
        self.name, self.seen = name, list[tuple[str, int]]()
        self._result, self._cached, self._missing = peers("contenders").Result, cached, missing

    def run(self, prompts: Sequence[Any], new_tokens: int) -> Any:
        self.seen += [(prompt.text, new_tokens) for prompt in prompts]
        computed = sum(len(prompt.ids) for prompt in prompts) - self._cached
        tokens = len(prompts) * new_tokens - self._missing
        return self._result(computed, tokens, 2.0, 0.5, 1.5)

    def close(self) -> None:
        pass


@pytest.fixture
def rounds(peers: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = peers("rounds")
    monkeypatch.setattr(module, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(module, "busy_shares", lambda _: (0.0, 0.0))
    monkeypatch.setattr(module, "settle", lambda: None)
    return module


def encode(text: str) -> list[int]:
    return list(range(len(text.split())))


def test_all_sides_get_the_same_prompts_and_none_twice(peers: Any, rounds: Any) -> None:
    sides = [Scripted(peers, "mindstream bf16"), Scripted(peers, "peer")]
    measured = rounds.Rounds(sides, encode)
    measured.run(2, [1, 2], long=False)
    assert sides[0].seen == sides[1].seen
    texts = [text for text, _ in sides[0].seen]
    assert len(set(texts)) == len(texts) == (1 + 2) + 2 * (1 + 2 + 1)
    assert measured.values["peer"]["tokens/s, 2 streams"] == [64.0, 64.0]  # 128 tokens in 2 s
    shown = peers("table").comparison(measured.values, {"mindstream bf16": "bf16"})
    assert "| tokens/s, 2 streams | 64 | 64 | 1.00x |" in shown


@pytest.mark.parametrize("fault", [{"cached": 16}, {"missing": 1}])
def test_a_side_that_computes_less_is_no_comparison(
    peers: Any, rounds: Any, fault: dict[str, int]
) -> None:
    sides = [Scripted(peers, "mindstream bf16"), Scripted(peers, "peer", **fault)]
    with pytest.raises(RuntimeError, match="peer computed"):
        rounds.Rounds(sides, encode).run(1, [1], long=False)


async def test_a_stream_is_read_to_its_last_events(peers: Any) -> None:
    events = [{"n": 1}, {"n": 2, "text": "data: {"}, {"usage": {"prompt_tokens": 5}}]
    text = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    text += b"data: [DONE]\n\n"
    # Cut where no event ends.
    pieces = [text[:7], text[7:30], text[30:]]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        (streamed,), seconds = await peers("sse_client").together(port, "/x", [{}])
    assert streamed.last_events == events[-2:]
    assert streamed.began < streamed.first <= streamed.last <= streamed.began + seconds
