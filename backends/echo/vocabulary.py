"""Token ids of the echo model: the tokenizer's, a second set for marking, and an end token.

An echo needs to know where the prompt ended, and a model sees nothing but tokens. So the backend
marks the prompt's last token by adding the vocabulary's size to its id.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment

_BYTES = 256


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`size` plain ids from 0, as many marked ones behind them, then the end token."""

    size: int

    @property
    def end(self) -> int:
        """What follows the prompt's last token in the output; gives no text."""
        return 2 * self.size

    @property
    def width(self) -> int:
        """Of the logits."""
        return 2 * self.size + 1


def vocabulary_of(deployment: Deployment) -> Vocabulary:
    """The bytes', or as config.json in the weight directory says. Raises ConfigError."""
    if deployment.serving.tokenizer == "bytes" or deployment.model_dir is None:
        return Vocabulary(_BYTES)
    return Vocabulary(_read_size(deployment.model_dir / "config.json"))


def _read_size(path: Path) -> int:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    size = content.get("vocab_size") if isinstance(content, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{path}: vocab_size must be a positive integer, found {size!r}.")
    return size
