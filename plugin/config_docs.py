"""`python -m mindstream.plugin.config_docs`: the field table of model_configs/README.md.

The table is made from the annotations of `serving_config`; a test keeps the file equal to it.
With `--write FILE` it replaces what stands between the two markers of that file.
"""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args

from mindstream.plugin.field_check import allowed, field_paths
from mindstream.plugin.serving_config import ServingConfig

BEGIN = "<!-- fields: made by `python -m mindstream.plugin.config_docs` -->"
END = "<!-- end of fields -->"


def field_table() -> str:
    """One Markdown row a field of `serving:`."""
    rows = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for name, hint in field_paths(ServingConfig):
        kind, meta = get_args(hint)[:2]
        if is_dataclass(kind):
            continue
        value = allowed(hint).replace("|", "\\|")
        meaning = meta.description.replace("|", "\\|")
        rows.append(f"| `{name}` | {value} | `{_shown(_default(name))}` | {meaning} |")
    return "\n".join(rows) + "\n"


def between_markers(text: str) -> str:
    """What a document holds between the markers."""
    return text.partition(BEGIN + "\n")[2].partition(END)[0]


def _default(name: str) -> object:
    value: object = ServingConfig()
    for word in name.split("."):
        value = getattr(value, word)
    return value


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def main(arguments: list[str]) -> None:
    """Prints the table, or rewrites a document."""
    if arguments[:1] != ["--write"]:
        print(field_table(), end="")
        return
    file = Path(arguments[1])
    head, _, rest = file.read_text(encoding="utf-8").partition(BEGIN + "\n")
    tail = rest.partition(END)[2]
    file.write_text(head + BEGIN + "\n" + field_table() + END + tail, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
