"""Backends by name: entry points of the group `mindstream.backends`, the built-in ones included."""

from __future__ import annotations

import logging
import time
from importlib.metadata import EntryPoint, entry_points

from mindstream.plugin.backend import BackendFactory
from mindstream.plugin.errors import ConfigError

GROUP = "mindstream.backends"
_SLOW_IMPORT = 0.1  # seconds; above it a start is worth explaining

log = logging.getLogger(__name__)


def backend_names() -> list[str]:
    """What is installed, sorted; nothing is imported."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_backend(name: str) -> BackendFactory:
    """Imports the named backend and no other. Raises ConfigError: unknown, ambiguous, broken."""
    point = _find(name)
    began = time.perf_counter()
    try:
        factory = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"Backend {name!r} ({point.value}{_origin(point)}) cannot be imported: {error}."
        ) from error
    took = time.perf_counter() - began
    if took > _SLOW_IMPORT:
        log.info("importing backend %s took %.1f s", name, took)
    if not callable(factory):
        raise ConfigError(
            f"Backend {name!r} ({point.value}{_origin(point)}) must be callable with a "
            f"Deployment, but is {type(factory).__name__}."
        )
    return factory  # type: ignore[no-any-return]  # an entry point is untyped by nature


def _find(name: str) -> EntryPoint:
    found = {point.value: point for point in entry_points(group=GROUP, name=name)}
    if not found:
        known = ", ".join(backend_names()) or "none"
        raise ConfigError(
            f"serving.backend: no backend is called {name!r}; installed backends: {known}."
        )
    if len(found) > 1:
        places = " and ".join(f"{p.value}{_origin(p)}" for p in found.values())
        raise ConfigError(f"Two backends are called {name!r}: {places}; uninstall one of them.")
    return next(iter(found.values()))


def _origin(point: EntryPoint) -> str:
    return f" of {point.dist.name}" if point.dist is not None else ""
