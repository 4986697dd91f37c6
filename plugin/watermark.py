"""The green-list watermark: its key, what is green, and the test that finds it in a text.

After Kirchenbauer et al., "A Watermark for Large Language Models" (ICML 2023), with the previous
token as context. The engine's sampler marks (`backends/engine/logits_processors.py` has the same
`is_green` for whole vocabularies), the command line detects. Pure; any thread.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment, WatermarkConfig

# What a deployment without a key file marks with. Anyone can detect it, and forge it.
PUBLIC_KEY = b"mindstream public watermark key"

# A text with a smaller p-value is called watermarked: one false alarm in a million plain texts.
ALARM = 1e-6

_MAX_KEY_BYTES = 65_536
_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class WatermarkKey:
    """The secret (32 bytes) and the strength: what a marker and a detector must share.

    `gamma` is the share of tokens that is green after a given token; `delta` is added to a green
    token's logit (a detector has no use for it).
    """

    secret: bytes = field(repr=False)
    gamma: float
    delta: float

    @property
    def threshold(self) -> int:
        """A token is green iff its 64-bit hash is below this."""
        return int(self.gamma * 2.0**64)

    def context_seed(self, previous_id: int) -> int:
        """uint64 that selects the green list after `previous_id`: BLAKE2b under the secret."""
        data = previous_id.to_bytes(8, "little")
        return int.from_bytes(
            hashlib.blake2b(data, digest_size=8, key=self.secret).digest(), "little"
        )

    def is_green(self, previous_id: int, token_id: int) -> bool:
        """Whether `token_id` is on the green list after `previous_id`.

        Output number `token_id` of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) started from the
        context's seed decides, so the vocabulary's size plays no part and a detector needs no list.
        """
        z = (self.context_seed(previous_id) + (token_id + 1) * _GOLDEN) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        return (z ^ (z >> 31)) < self.threshold


@dataclass(frozen=True, slots=True)
class Detection:
    """The evidence of a watermark in one text.

    `scored` distinct pairs of neighbouring tokens were looked at, and `green` of them are green.
    `p_value` is the chance that a text written without the key has at least as many (exact binomial
    tail); `z` is the same in standard deviations.
    """

    z: float
    p_value: float
    green: int
    scored: int

    @property
    def watermarked(self) -> bool:
        """Whether the p-value is below `ALARM`."""
        return self.p_value < ALARM


def detect(token_ids: Sequence[int], key: WatermarkKey, vocab_size: int) -> Detection:
    """Tests a text, given as ids in [0, `vocab_size`), for the watermark of `key`.

    The first token only serves as context. A pair that repeats is counted once: it is the same coin
    seen again, and counting it twice would raise false alarms in repetitive text. Raises ValueError
    for an id outside the vocabulary: it was made by another model's tokenizer.
    """
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary [0, {vocab_size})")
    pairs = set(pairwise(token_ids))
    scored, green = len(pairs), sum(key.is_green(*pair) for pair in pairs)
    expected = key.gamma * scored
    z = (green - expected) / math.sqrt(expected * (1 - key.gamma)) if scored else 0.0
    return Detection(z, _binomial_tail(green, scored, key.gamma), green, scored)


def load_key(deployment: Deployment, key_file: str | Path | None = None) -> WatermarkKey:
    """The key of a deployment; `key_file` replaces its `serving.watermark.key_file`.

    A relative path in the deployment starts at the deployment's folder, `key_file` at the working
    directory. White space at the ends of the file does not count. Raises ConfigError.
    """
    config: WatermarkConfig = deployment.serving.watermark
    if key_file is not None:
        return _key(config, Path(key_file).absolute(), "--key-file")
    if not config.key_file:
        return _derive(PUBLIC_KEY, config)
    path = deployment.path.parent / Path(config.key_file).expanduser()
    return _key(config, path, f"{deployment.path}: serving.watermark.key_file")


def _key(config: WatermarkConfig, path: Path, field_name: str) -> WatermarkKey:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{field_name}: cannot read the watermark key {path}: {error.strerror}"
        ) from error
    if len(content) > _MAX_KEY_BYTES:
        raise ConfigError(
            f"{field_name}: the watermark key {path} is larger than {_MAX_KEY_BYTES} bytes"
        )
    if not content.strip():
        raise ConfigError(
            f"{field_name}: the watermark key {path} is empty; write at least 16 random bytes to it"
        )
    return _derive(content.strip(), config)


def _derive(content: bytes, config: WatermarkConfig) -> WatermarkKey:
    return WatermarkKey(hashlib.sha256(content).digest(), config.gamma, config.delta)


def _binomial_tail(successes: int, trials: int, share: float) -> float:
    """P(X >= successes) for X ~ Binomial(trials, share), to about 12 digits; 0.0 below 1e-300."""
    if successes <= 0:
        return 1.0
    if successes <= trials * share:  # the other tail is the one whose terms fall from its edge
        return 1.0 - _binomial_tail(trials - successes + 1, trials, 1.0 - share)
    log_term = (
        math.lgamma(trials + 1)
        - math.lgamma(successes + 1)
        - math.lgamma(trials - successes + 1)
        + successes * math.log(share)
        + (trials - successes) * math.log1p(-share)
    )
    total = term = math.exp(log_term)
    odds = share / (1.0 - share)
    for count in range(successes, trials):
        term *= (trials - count) / (count + 1) * odds
        total += term
        if term < total * 1e-17:
            break
    return min(total, 1.0)
