"""Health and what is served: for orchestrators, and for clients at their start."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version as installed_version
from typing import Any

import msgspec

from mindstream.handlers.base import ApiHandler, GetHandler
from mindstream.handlers.error_map import PlainFailure
from mindstream.handlers.state import WIRE_NAME, require_running
from mindstream.handlers.wire_json import encode
from mindstream.plugin.backend import BackendStatus, State
from mindstream.plugin.errors import Overloaded, ServiceStopped
from mindstream.plugin.service import ModelService

_STOPPED = "The service has been stopped."
# From best to worst: a server is as healthy as its worst model.
_ORDER = (
    State.READY,
    State.BUSY,
    State.STARTING,
    State.RESTARTING,
    State.FAILED,
    State.STOPPED,
)
# The real server's.
METRICS_TYPE = "text/plain; charset=utf-8"
_BUSY = "Service is alive but busy"


class Live(GetHandler):
    """Whether the process is worth keeping; one whose engine comes back is."""

    async def answer(self) -> None:
        state = _worst(self.state.services.values()).state
        if state is State.STOPPED:
            raise ServiceStopped(_STOPPED)
        if state is State.FAILED:
            return _message(self, 500, "Service is abnormal")
        if state is State.BUSY:
            return _message(self, 200, _BUSY)
        self.write_empty()


class Ready(GetHandler):
    """Whether a request sent now would be taken."""

    async def answer(self) -> None:
        state = _worst(self.state.services.values()).state
        if state is State.STOPPED:
            raise ServiceStopped(_STOPPED)
        if state is State.BUSY:
            return _message(self, 503, f"{_BUSY}. Consider reducing request frequency")
        if state is State.FAILED:
            return _message(self, 500, "Service is abnormal")
        if state is not State.READY:
            return _message(self, 503, f"Service is {state.value}")
        self.write_empty()


class Health(GetHandler):
    """Whether every model would take a request now."""

    async def answer(self) -> None:
        _require_ready(self, _worst(self.state.services.values()))


class ModelReady(GetHandler):
    """Whether this model would take a request now."""

    async def answer(self, model: str, version: str | None = None) -> None:
        _require_ready(self, self.state.model(model, version).status())


class ModelList(GetHandler):
    """The served models, indented by four and sorted by key as the real server does it."""

    async def answer(self) -> None:
        models = [
            {
                "id": service.name,
                "object": "model",
                "owned_by": WIRE_NAME,
                "parent": "null",
                "root": str(service.deployment.model_dir or ""),
            }
            for service in self.state.services.values()
        ]
        body = encode({"data": models, "object": "list"})
        self.write_json(msgspec.json.format(body, indent=4))


class ModelEntry(GetHandler):
    """One served model."""

    async def answer(self, model: str) -> None:
        service = self.state.model(model)
        self.write_json(
            {
                "id": service.name,
                "object": "model",
                "created": self.state.created,
                "owned_by": WIRE_NAME,
            }
        )


class Info(GetHandler):
    """Limits and models, as text-generation-inference tells them."""

    async def answer(self) -> None:
        services = list(self.state.services.values())
        for service in services:
            require_running(service)
        serving, limits = services[0].deployment.serving, services[0].limits
        self.write_json(
            {
                "docker_label": None,
                "max_batch_total_tokens": serving.max_batched_tokens,
                "max_best_of": 1,
                "max_concurrent_requests": serving.max_batch_size,
                "max_stop_sequences": None,
                "max_waiting_tokens": None,
                "sha": None,
                "validation_workers": None,
                "version": installed_version("mindstream"),
                "waiting_served_ratio": None,
                "models": [_info_of(service) for service in services],
                "max_input_length": limits.max_input_tokens,
            }
        )


class MetricsText(GetHandler):
    """Counters, gauges and histograms of every model in Prometheus' text format."""

    async def answer(self) -> None:
        self.set_header("Content-Type", METRICS_TYPE)
        self.finish(self.state.metrics.text())


def _worst(services: Iterable[ModelService]) -> BackendStatus:
    statuses = [service.status() for service in services]
    return max(statuses, key=lambda status: _ORDER.index(status.state))


def _require_ready(handler: ApiHandler, status: BackendStatus) -> None:
    """Answers 200 or raises what the state means for a request sent now."""
    if status.state is State.STOPPED:
        raise ServiceStopped(_STOPPED)
    if status.state is State.FAILED:
        raise PlainFailure(status.reason or "The engine does not come back.")
    if status.state is not State.READY:
        raise Overloaded(f"The service is {status.state.value}.")
    handler.write_empty()


def _message(handler: ApiHandler, status: int, message: str) -> None:
    handler.set_status(status)
    handler.write_json({"message": message})


def _info_of(service: ModelService) -> dict[str, Any]:
    return {
        "model_device_type": None,
        "model_dtype": None,
        "model_id": service.name,
        "model_pipeline_tag": "text-generation",
        "model_sha": None,
        "max_total_tokens": service.limits.max_seq_len,
    }
