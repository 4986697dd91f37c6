"""What a scenario gives: one number beside its target."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `detail` holds the numbers it was computed from.

    Without a target it stands for itself.
    """

    name: str
    value: float
    unit: str
    target: float | None
    at_least: bool  # else at most
    detail: dict[str, object] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def row(self) -> tuple[str, str, str, str]:
        """Cells of a table."""
        value = f"{self.value:.3g}" if self.value < 1000 else f"{self.value:.0f}"
        if self.target is None:
            return self.name, f"{value} {self.unit}", "", ""
        bound = ("at least " if self.at_least else "at most ") + f"{self.target:g} {self.unit}"
        return self.name, f"{value} {self.unit}", bound, "yes" if self.met else "NO"


def markdown(figures: Sequence[Figure]) -> str:
    """A table that can go into a README as it is."""
    rows = [("what", "measured", "target", "met"), *(figure.row() for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """What the numbers hold for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.processor() or "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
