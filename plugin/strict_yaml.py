"""YAML reading that hides nothing: bad syntax and duplicate keys become ConfigErrors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mindstream.plugin.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """PyYAML silently keeps the last of two equal keys; an operator would edit the dead one."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    lines: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str | int | float | bool | None):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a plain value", key_node.start_mark
            )
        if key in lines:
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"key {key!r} appears twice, in lines {lines[key]} and {line}",
                key_node.start_mark,
            )
        lines[key] = line
    loader.flatten_mapping(node)
    return {
        loader.construct_object(k, deep=True): loader.construct_object(v, deep=True)
        for k, v in node.value
    }


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_mapping(path: Path) -> dict[str, Any]:
    """The file's one document as a mapping. Raises ConfigError naming file, place and cause."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a yaml file: byte {error.start} is not UTF-8 text."
        ) from None
    data = _parse(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} must hold a mapping of keys to values at its top level, "
            f"but holds {describe(data)}."
        )
    return data


def parse_value(text: str, where: str) -> Any:
    """A value as yaml would read it behind `key:`."""
    return _parse(text, where)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        # "expected X" is the context where the problem goes on with "but found Y".
        words = f"{error.context} " if str(error.problem).startswith("but ") else ""
        raise ConfigError(f"{where}{place}: not valid yaml: {words}{error.problem}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where} is not valid yaml: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply for yaml.") from None


def describe(value: object) -> str:
    """A value for an error message: `nothing`, `'abc'`, `a list of 3`."""
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
