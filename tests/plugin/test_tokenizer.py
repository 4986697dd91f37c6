"""Text to ids and back: pieces are never half a character, and joined they are the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from mindstream.plugin.detokenizer import Detokenizer, WindowDetokenizer
from mindstream.plugin.errors import ConfigError, InvalidRequest
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.tokenizer import BytesTokenizer, HFTokenizer, decode, open_tokenizer

SPECIAL, ADDED = 256, 257


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, one special token, one added token that is plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(["<|end|>"])
    hf.add_tokens(["<think né>"])
    hf.enable_truncation(4)
    hf.enable_padding(length=9)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    hf.save(str(file))
    return file


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As LLaMA 2's: a visible space, byte tokens, and the first space of a text dropped."""
    words = ["<unk>", "</s>", "\u2581", "\u2581the", "\u2581cat", "s", "\u2581猫", "猫"]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    vocab = {word: i for i, word in enumerate(words + bytes_)}
    hf = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    hf.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    hf.add_special_tokens(["</s>"])
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    hf.save(str(file))
    return file


def pieces(text: Detokenizer, ids: list[int]) -> list[str]:
    return [*(text.push(token_id) for token_id in ids), text.flush()]


class TestByteLevel:
    @given(st.lists(st.integers(0, ADDED + 3)))
    def test_pieces_are_what_hf_decodes(self, byte_level: Path, ids: list[int]) -> None:
        tokenizer = HFTokenizer(byte_level)
        expected = tokenizers.Tokenizer.from_file(str(byte_level)).decode(ids)
        assert decode(tokenizer, ids) == expected

    @given(st.text())
    def test_a_text_comes_back_without_half_characters(self, byte_level: Path, text: str) -> None:
        tokenizer = HFTokenizer(byte_level)
        given_text = text.replace("\ufffd", "")
        if "<think" in given_text or "<|end|>" in given_text:
            return
        got = pieces(tokenizer.detokenizer(), tokenizer.encode(given_text))
        assert "".join(got) == given_text
        assert not any("\ufffd" in piece for piece in got)

    def test_a_prompt_is_neither_cut_nor_padded(self, byte_level: Path) -> None:
        assert len(HFTokenizer(byte_level).encode("abcdefghijklmnop")) == 16
        assert len(HFTokenizer(byte_level).encode("ab")) == 2

    def test_special_tokens_are_read_and_give_no_text(self, byte_level: Path) -> None:
        tokenizer = HFTokenizer(byte_level)
        ids = tokenizer.encode("a<|end|>b<think né>")
        assert SPECIAL in ids and ADDED in ids
        assert decode(tokenizer, ids) == "ab<think né>"

    def test_vocabulary(self, byte_level: Path) -> None:
        assert HFTokenizer(byte_level).vocab_size == 258

    def test_an_incomplete_tail_is_held_and_flushed(self, byte_level: Path) -> None:
        tokenizer = HFTokenizer(byte_level)
        ids = tokenizer.encode("a€")
        assert pieces(tokenizer.detokenizer(), ids) == ["a", "", "", "€", ""]
        assert pieces(tokenizer.detokenizer(), ids[:3]) == ["a", "", "", "\ufffd"]


class TestSentencePiece:
    def test_spaces_and_byte_tokens(self, sentence_piece: Path) -> None:
        tokenizer = HFTokenizer(sentence_piece)
        hf = tokenizers.Tokenizer.from_file(str(sentence_piece))
        euro = [hf.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
        ids = [3, 4, 5, *euro, 1, 3, 6, 7]
        got = pieces(tokenizer.detokenizer(), ids)
        assert got == ["the", " cat", "s", "", "", "€", "", " the", " 猫", "猫", ""]
        assert "".join(got) == hf.decode(ids)
        assert pieces(tokenizer.detokenizer(), [3, euro[0]]) == ["the", "", "\ufffd"]

    @given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7]), max_size=40))
    def test_pieces_are_what_hf_decodes(self, sentence_piece: Path, ids: list[int]) -> None:
        expected = tokenizers.Tokenizer.from_file(str(sentence_piece)).decode(ids)
        assert decode(HFTokenizer(sentence_piece), ids) == expected

    @given(st.text("aé€👋", max_size=30))
    def test_characters_of_byte_tokens(self, sentence_piece: Path, text: str) -> None:
        tokenizer = HFTokenizer(sentence_piece)
        ids = [8 + byte for byte in text.encode()]
        got = pieces(tokenizer.detokenizer(), ids)
        assert "".join(got) == text and not any("\ufffd" in piece for piece in got)


def test_the_window_stays_small_whatever_comes() -> None:
    """O(1) a token: also for broken bytes and for tokens without text."""
    longest = 0

    def decode_window(ids: object) -> str:
        nonlocal longest
        assert isinstance(ids, list)
        longest = max(longest, len(ids))
        return "".join({0: "", 1: "\ufffd"}.get(i, "x") for i in ids)

    for token_id in (0, 1, 2):
        text = WindowDetokenizer(decode_window)
        for _ in range(500):
            text.push(token_id)
        text.flush()
    assert longest <= 20


class TestBytes:
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_round_trip(self, text: str) -> None:
        tokenizer = BytesTokenizer()
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.encode()) and decode(tokenizer, ids) == text

    def test_an_end_token_gives_no_text(self) -> None:
        assert decode(BytesTokenizer(), [104, 105, 256]) == "hi"


@pytest.mark.parametrize("text", ["a\ud800", "\udfff"])
def test_a_lone_surrogate_is_refused(byte_level: Path, text: str) -> None:
    for tokenizer in (BytesTokenizer(), HFTokenizer(byte_level)):
        with pytest.raises(InvalidRequest, match=r"lone surrogate, U\+D[8F]"):
            tokenizer.encode(text)


class TestOpen:
    def test_bytes(self) -> None:
        assert isinstance(open_tokenizer(load_deployment("echo")), BytesTokenizer)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "m.yaml").write_text("a: 1")
        with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: No such file"):
            open_tokenizer(load_deployment(tmp_path))

    @pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff"])
    def test_a_broken_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json is "):
            HFTokenizer(tmp_path / "tokenizer.json")

    def test_no_weight_directory(self, tmp_path: Path) -> None:
        (tmp_path / "m.yaml").write_text("a: 1")
        with pytest.raises(ConfigError, match="needs a weight directory"):
            open_tokenizer(load_deployment(tmp_path / "m.yaml"))
