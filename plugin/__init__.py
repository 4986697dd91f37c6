"""The contract between server and backends, and the composition of both.

The names below are all that a Tornado process needs to serve a model among its own routes. They are
loaded at first use: the engine process imports this package and needs neither tornado nor a
tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindstream.plugin.app import make_app, routes
    from mindstream.plugin.model_config import Deployment, load_deployment
    from mindstream.plugin.service import ModelService, open_service

__all__ = [
    "Deployment",
    "ModelService",
    "load_deployment",
    "make_app",
    "open_service",
    "routes",
]

_HOMES = {
    "Deployment": "model_config",
    "ModelService": "service",
    "load_deployment": "model_config",
    "make_app": "app",
    "open_service": "service",
    "routes": "app",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
