"""Deployments for the engine's tests, and drivers that run requests to their end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindstream.plugin.model_config import Deployment, ServingConfig

DeploymentFactory = Callable[..., Deployment]


@pytest.fixture
def deployment() -> DeploymentFactory:
    """`deployment(num_blocks=8, serving={...}, echo={...})` for HashModel or echo."""

    def make(serving: dict[str, Any] | None = None, **hash_model: Any) -> Deployment:
        config = ServingConfig(**{"name": "test", "tokenizer": "bytes", **(serving or {})})
        return Deployment(Path("test.yaml"), config, {"hash_model": hash_model}, None)

    return make


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def either_loop(request: pytest.FixtureRequest, deployment: DeploymentFactory) -> DeploymentFactory:
    """`deployment`, once for each engine loop."""

    def make(serving: dict[str, Any] | None = None, **hash_model: Any) -> Deployment:
        return deployment({**(serving or {}), "overlap": request.param}, **hash_model)

    return make
