"""One yaml file is one deployment: a MindFormers predict yaml with one more block, `serving:`.

`load_deployment` turns what the operator named (a shipped name, a file, or a weight directory as
MindIE's modelWeightPath) into a frozen `Deployment`. Errors are ConfigError sentences that name the
file, the field, the value found and what would be right.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mindstream.plugin import paths
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.field_check import check_block, field_paths, same_word
from mindstream.plugin.serving_config import (
    CompatConfig,
    CpuConfig,
    EchoConfig,
    MediaConfig,
    ServingConfig,
    WatermarkConfig,
)
from mindstream.plugin.strict_yaml import describe, parse_value, read_mapping

__all__ = [
    "CompatConfig",
    "CpuConfig",
    "Deployment",
    "EchoConfig",
    "MediaConfig",
    "ServingConfig",
    "WatermarkConfig",
    "load_deployment",
    "shipped_names",
]


@dataclass(frozen=True, slots=True)
class Deployment:
    """One yaml file, read. Plain data: it may be pickled into another process.

    `mindformers` is the rest of the yaml, untouched.
    """

    path: Path
    serving: ServingConfig
    mindformers: Mapping[str, Any]
    model_dir: Path | None  # the weight directory, absolute; None: the backend needs none

    @property
    def name(self) -> str:
        """The served model name."""
        return self.serving.name or self.path.stem


def shipped_names() -> list[str]:
    """The deployments that come with mindstream, sorted."""
    folder = resources.files("mindstream.model_configs")
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_deployment(target: str | Path, overrides: Mapping[str, str] | None = None) -> Deployment:
    """Reads what `target` names: a weight directory, a yaml file, or a shipped name, in this order.

    `overrides` are dotted paths with yaml values: `max_batch_size: "8"` and
    `serving.max_batch_size: "8"` are the same; any other first word is a key of the MindFormers
    part. The weight directory need not exist yet. Raises ConfigError.
    """
    path, given_folder = _locate(target)
    data = read_mapping(path)
    for key, text in (overrides or {}).items():
        _override(data, key, text)
    serving = check_block(ServingConfig, data.pop("serving", None), str(path), "serving")
    _refuse_misspelt_block(data, path)
    return Deployment(path, serving, data, _model_dir(path, serving, data, given_folder))


def _locate(target: str | Path) -> tuple[Path, bool]:
    """(the yaml file, whether its folder was named)."""
    path = Path(target).expanduser().absolute()
    if path.is_dir():
        return _only_yaml(path), True
    if path.is_file():
        return path, False
    names = shipped_names()
    if str(target) in names:
        return Path(str(resources.files("mindstream.model_configs") / f"{target}.yaml")), False
    near = difflib.get_close_matches(str(target), names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{str(target)!r} is neither a file, nor a weight directory, nor a shipped deployment "
        f"({', '.join(names)}).{hint}"
    )


def _only_yaml(folder: Path) -> Path:
    found = sorted(p for p in folder.iterdir() if p.suffix == ".yaml" and p.is_file())
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{folder} must hold exactly one *.yaml file, but holds {len(found)}: "
            f"{', '.join(p.name for p in found)}; name the file itself."
        )
    there = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())
    shown = ", ".join(there[:12]) + (f" and {len(there) - 12} more" if len(there) > 12 else "")
    raise ConfigError(
        f"{folder} must hold exactly one *.yaml file, but holds none; it holds: "
        f"{shown or 'nothing at all'}."
    )


def _override(data: dict[str, Any], key: str, text: str) -> None:
    words = key.split(".")
    if not all(words):
        raise ConfigError(f"--set {key}: a key is words with dots between, such as cpu.threads.")
    fields = ServingConfig.__dataclass_fields__
    if words[0] in fields:
        words.insert(0, "serving")
    elif words[0] not in data:
        near = _serving_field(words[0])
        if near:
            raise ConfigError(f"--set {key}: unknown key {words[0]!r}. Did you mean {near!r}?")
    block = data
    for depth, word in enumerate(words[:-1], 1):
        inner = block.get(word)
        if inner is None:
            inner = block[word] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--set {key}: {'.'.join(words[:depth])} is {describe(inner)}, not a mapping."
            )
        block = inner
    block[words[-1]] = parse_value(text, f"--set {key}")


def _serving_field(word: str) -> str | None:
    """The field of `serving:` that a word means, whatever block it is in and whoever spells it."""
    names = [name for name, _ in field_paths(ServingConfig)]
    known = same_word(word, names)
    if known:
        return known
    near = difflib.get_close_matches(word, names, 1, 0.8)
    return near[0] if near else None


def _refuse_misspelt_block(data: Mapping[str, Any], path: Path) -> None:
    for key in data:
        if difflib.SequenceMatcher(None, str(key).lower(), "serving").ratio() >= 0.85:
            raise ConfigError(f"{path}: unknown key {key!r}; the block is called 'serving'.")


def _model_dir(
    path: Path, serving: ServingConfig, data: Mapping[str, Any], given_folder: bool
) -> Path | None:
    named = serving.model_weight_path or data.get("pretrained_model_dir")
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"{path}: pretrained_model_dir must be text, but is {describe(named)}.")
    pulled = paths.models_dir() / serving.pull if serving.pull else None
    if named:
        folder = (path.parent / Path(named).expanduser()).absolute()
        return pulled if pulled and not folder.is_dir() else folder
    if pulled:
        return pulled
    # As MindIE's modelWeightPath: the yaml lies beside the weights.
    beside = given_folder or (path.parent / "config.json").is_file()
    return path.parent.absolute() if beside else None
