"""Text to token ids. The tokenizer.json of a weight directory through HF `tokenizers`, or bytes.

`encode` may run in a worker thread; everything else belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mindstream.plugin.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from mindstream.plugin.errors import ConfigError, InvalidRequest
from mindstream.plugin.model_config import Deployment

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Every id that `encode` gives is below it."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, the model's own start tokens included. Raises InvalidRequest."""

    def detokenizer(self) -> Detokenizer:
        """A fresh one for one answer; special tokens give no text."""


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """The whole text of an answer: the streamed pieces joined, by construction."""
    pieces = tokenizer.detokenizer()
    return "".join([pieces.push(token_id) for token_id in ids]) + pieces.flush()


def open_tokenizer(deployment: Deployment) -> Tokenizer:
    """What `serving.tokenizer` asks for. Raises ConfigError naming the file."""
    if deployment.serving.tokenizer == "bytes":
        return BytesTokenizer()
    if deployment.model_dir is None:
        raise ConfigError(
            f"{deployment.path}: serving.tokenizer is 'auto', which needs a weight directory with "
            "a tokenizer.json; set serving.model_weight_path, or serving.tokenizer to 'bytes'."
        )
    return HFTokenizer(deployment.model_dir / "tokenizer.json")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequest(
            f"The text holds a lone surrogate, U+{code:04X}, at character {error.start}; "
            "UTF-8 has no such character."
        ) from None


class BytesTokenizer:
    """One token a UTF-8 byte. An id above 255, such as a backend's end token, gives no text."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        return list(text.encode())

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(lambda token_id: bytes((token_id,)) if token_id < 256 else b"")


class HFTokenizer:
    """A tokenizer.json. Special tokens in a prompt's text are read as such, as HF and MindIE do."""

    def __init__(self, file: Path) -> None:
        self._hf = _read(file)
        # A prompt must never be cut or padded, whatever the file was saved with.
        self._hf.no_truncation()
        self._hf.no_padding()
        self.vocab_size = _highest_id(self._hf) + 1
        self._special = frozenset(
            token_id
            for token_id, token in self._hf.get_added_tokens_decoder().items()
            if token.special
        )
        self._is_byte_level = type(self._hf.decoder).__name__ == "ByteLevel"
        self._cached_bytes = lru_cache(maxsize=None)(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        # The batch call is the one that releases the GIL, so that a worker thread helps.
        ids: list[int] = self._hf.encode_batch_fast([text])[0].ids
        return ids

    def detokenizer(self) -> Detokenizer:
        if self._is_byte_level:
            return ByteDetokenizer(self._cached_bytes)
        return WindowDetokenizer(self._decode_window)

    def _decode_window(self, ids: Sequence[int]) -> str:
        text: str = self._hf.decode(list(ids), skip_special_tokens=True)
        return text

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._hf.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        alphabet = _byte_alphabet()
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:
            # An added token is stored as its plain text.
            return str(token).encode()


def _read(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is broken: byte {error.start} is not UTF-8 text.") from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the Rust binding raises Exception itself
        raise ConfigError(f"{file} is not a tokenizer of HF tokenizers: {error}.") from None


def _highest_id(hf: tokenizers.Tokenizer) -> int:
    return max(hf.get_vocab(with_added_tokens=True).values(), default=-1)


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 for itself, the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}
