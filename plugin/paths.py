"""Where mindstream keeps what it fetched."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """MINDSTREAM_CACHE, else $XDG_CACHE_HOME/mindstream, else ~/.cache/mindstream. Not created."""
    own = os.environ.get("MINDSTREAM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    # The XDG specification tells to ignore a relative XDG_CACHE_HOME.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base / "mindstream"


def models_dir() -> Path:
    """Below it every pulled model has a folder of its name."""
    return cache_dir() / "models"
