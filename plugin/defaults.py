"""Where a sampling value comes from when the request does not say: yaml, weight directory, rule.

Rules, from the protocol's page on top_k and applied to the other values alike:
- `ms` (MindSpore): the yaml. Its mcore layout (`use_legacy: False`) has a top-level
  `generation_config:` over the weight directory's generation_config.json, which top_k does not
  read; its legacy layout has `model.model_config`. An absent top_k is 0 (off).
- `atb`: generation_config.json over config.json. An absent top_k is 1000.
No default of MindFormers' own classes (top_k 50 or 5) plays a part.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import SamplingParams

T = TypeVar("T")
Rule = Literal["ms", "atb"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sourced(Generic[T]):
    """A value and where it was found, such as `qwen3.yaml: generation_config.top_k`."""

    value: T
    source: str


@dataclass(frozen=True, slots=True)
class Defaults:
    """Every value a request may leave out, resolved once at start."""

    rule: Rule
    vocab_size: Sourced[int]  # of config.json, 0 if it has none: what a larger top_k becomes
    eos_token_ids: Sourced[tuple[int, ...]]
    do_sample: Sourced[bool]
    temperature: Sourced[float]
    top_k: Sourced[int]
    top_p: Sourced[float]
    typical_p: Sourced[float | None]
    repetition_penalty: Sourced[float]

    def sampling(
        self,
        *,
        seed: int,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        typical_p: float | None = None,
        repetition_penalty: float | None = None,
        watermark: bool = False,
    ) -> SamplingParams:
        """The request's values (None: absent) over these. `do_sample` absent: true if any value
        that only sampling reads was given, else the default."""
        given = (temperature, top_k, top_p, typical_p)
        if do_sample is None:
            do_sample = self.do_sample.value or any(value is not None for value in given)
        k = self.top_k.value if top_k is None else top_k
        return SamplingParams(
            do_sample=do_sample,
            temperature=self.temperature.value if temperature is None else temperature,
            top_k=min(k, self.vocab_size.value),
            top_p=self.top_p.value if top_p is None else top_p,
            typical_p=self.typical_p.value if typical_p is None else typical_p,
            repetition_penalty=(
                self.repetition_penalty.value if repetition_penalty is None else repetition_penalty
            ),
            watermark=watermark,
            seed=seed,
        )

    def describe(self) -> dict[str, dict[str, Any]]:
        """{field: {"value": ..., "source": ...}} for the configuration route; JSON types."""
        shown = {}
        for field in fields(self):
            entry = getattr(self, field.name)
            if isinstance(entry, Sourced):
                value = list(entry.value) if isinstance(entry.value, tuple) else entry.value
                shown[field.name] = {"value": value, "source": entry.source}
        return shown


@dataclass(frozen=True, slots=True)
class _Place:
    """One mapping to look a key up in."""

    label: str  # before the key, as in `qwen3.yaml: generation_config.`
    values: Mapping[str, Any]


def resolve_defaults(deployment: Deployment, backend_rule: Rule = "ms") -> Defaults:
    """Reads yaml, generation_config.json and config.json. Raises ConfigError for a bad value."""
    wanted = deployment.serving.defaults_rule
    rule: Rule = backend_rule if wanted == "auto" else wanted
    yaml = _yaml_place(deployment)
    generation = _json_place(deployment.model_dir, "generation_config.json")
    config = _json_place(deployment.model_dir, "config.json")
    places = [yaml, generation] if rule == "ms" else [generation, config]
    top_k = Sourced(0, "rule ms") if rule == "ms" else Sourced(1000, "rule atb")
    off: Sourced[float | None] = Sourced(None, "default")
    return Defaults(
        rule=rule,
        vocab_size=_vocab_size(config, deployment),
        eos_token_ids=_eos_ids(yaml, config, generation),
        do_sample=_find(places, "do_sample", _DO_SAMPLE, Sourced(False, "default")),
        temperature=_find(places, "temperature", _TEMPERATURE, Sourced(1.0, "default")),
        top_k=_find([yaml] if rule == "ms" else places, "top_k", _TOP_K, top_k),
        top_p=_find(places, "top_p", _TOP_P, Sourced(1.0, "default")),
        typical_p=_find(places, "typical_p", _TYPICAL_P, off),
        repetition_penalty=_find(places, "repetition_penalty", _PENALTY, Sourced(1.0, "default")),
    )


@dataclass(frozen=True, slots=True)
class _Check:
    accepts: Callable[[Any], bool]
    words: str


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_DO_SAMPLE = _Check(lambda v: isinstance(v, bool), "true or false")
_TEMPERATURE = _Check(lambda v: _number(v) and v > 1e-6, "a number > 1e-6")
_TOP_K = _Check(lambda v: _whole(v) and 0 <= v <= 2**31 - 1, "a whole number in [0, 2147483647]")
_TOP_P = _Check(lambda v: _number(v) and 1e-6 < v <= 1, "a number in (1e-6, 1.0]")
_TYPICAL_P = _Check(lambda v: _number(v) and 0 < v <= 1, "a number in (0.0, 1.0]")
_PENALTY = _Check(lambda v: _number(v) and v > 0, "a number > 0.0")


def _find(places: list[_Place], key: str, check: _Check, default: Sourced[Any]) -> Sourced[Any]:
    for place in places:
        value = place.values.get(key)
        if value is None:
            continue
        if not check.accepts(value):
            raise ConfigError(f"{place.label}{key} must be {check.words}, but is {value!r}.")
        return Sourced(value, f"{place.label}{key}")
    return default


def _yaml_place(deployment: Deployment) -> _Place:
    data = deployment.mindformers
    model = data.get("model")
    legacy = data.get("use_legacy") is not False and isinstance(model, Mapping)
    block = model.get("model_config") if legacy and isinstance(model, Mapping) else None
    where = "model.model_config" if legacy else "generation_config"
    if not legacy:
        block = data.get("generation_config")
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError(f"{deployment.path}: {where} must be a mapping, but is {block!r}.")
    return _Place(f"{deployment.path.name}: {where}.", block or {})


def _json_place(folder: Path | None, name: str) -> _Place:
    """An absent file is an empty one: whether weights need it is for the backend to say."""
    if folder is None or not (folder / name).is_file():
        return _Place(f"{name}: ", {})
    file = folder / name
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold a JSON object.")
    return _Place(f"{name}: ", data)


def _vocab_size(config: _Place, deployment: Deployment) -> Sourced[int]:
    for key in ("vocab_size", "padded_vocab_size"):
        value = config.values.get(key)
        if value is None:
            continue
        if not _whole(value) or value < 0:
            raise ConfigError(f"{config.label}{key} must be a whole number >= 0, but is {value!r}.")
        return Sourced(value, f"{config.label}{key}")
    if deployment.model_dir is None:
        return Sourced(0, "default")
    log.warning(
        "%s: neither vocab_size nor padded_vocab_size in config.json of %s: the vocabulary size "
        "counts as 0 and every top_k as off",
        deployment.name,
        deployment.model_dir or "the weight directory (none)",
    )
    return Sourced(0, "default")


def _eos_ids(yaml: _Place, config: _Place, generation: _Place) -> Sourced[tuple[int, ...]]:
    """The yaml's, else those of both JSON files: generation_config.json often adds one."""
    own = _ids(yaml)
    if own:
        return Sourced(own, f"{yaml.label}eos_token_id")
    both = {place.label: _ids(place) for place in (config, generation)}
    found = tuple(dict.fromkeys(token_id for ids in both.values() for token_id in ids))
    source = " and ".join(f"{label}eos_token_id" for label, ids in both.items() if ids)
    return Sourced(found, source or "default")


def _ids(place: _Place) -> tuple[int, ...]:
    value = place.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_whole, ids)):
        raise ConfigError(
            f"{place.label}eos_token_id must be a token id or a list of them, but is {value!r}."
        )
    return tuple(token_id for token_id in ids if token_id >= 0)  # -1: MindFormers' "none"
