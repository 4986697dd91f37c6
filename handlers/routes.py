"""Which path goes to which handler. docs/protocol.md lists the table, a test calls every row."""

from __future__ import annotations

from dataclasses import dataclass

from tornado.routing import URLSpec

from mindstream.handlers import management, triton, triton_control
from mindstream.handlers.base import ApiHandler, PostHandler
from mindstream.handlers.state import ServerState

_MODEL = r"(?P<model>[^/]+)"
_VERSION = r"(?:/versions/(?P<version>[^/]+))?"


@dataclass(frozen=True, slots=True)
class Route:
    """One route. `path` has `{m}` for the model and `{v}` for an optional version segment."""

    path: str
    handler: type[ApiHandler]

    @property
    def method(self) -> str:
        return "POST" if issubclass(self.handler, PostHandler) else "GET"

    def spec(self, state: ServerState) -> URLSpec:
        pattern = self.path.replace("{v}", _VERSION).replace("{m}", _MODEL)
        return URLSpec(pattern, self.handler, {"state": state})


ROUTES = (
    Route("/v2/models/{m}{v}/generate_stream", triton.GenerateStream),
    Route("/v2/models/{m}{v}/generate", triton.Generate),
    Route("/v2/models/{m}{v}/infer", triton.Infer),
    Route("/v2/models/{m}{v}/stopInfer", triton_control.StopInfer),
    Route("/v2/models/{m}{v}/getSlotCount", triton_control.SlotCount),
    Route("/v2/models/{m}{v}/config", triton_control.ModelConfig),
    Route("/v2/models/{m}{v}/ready", management.ModelReady),
    Route("/v2/models/{m}{v}", triton_control.ModelMetadata),
    Route("/v2", triton_control.ServerMetadata),
    Route("/v2/health/live", management.Live),
    Route("/v2/health/ready", management.Ready),
    Route("/health", management.Health),
    Route("/info", management.Info),
    Route("/metrics", management.MetricsText),
    Route("/v1/models", management.ModelList),
    Route("/v1/models/{m}", management.ModelEntry),
)


def route_specs(state: ServerState) -> list[URLSpec]:
    """Every route, for a `tornado.web.Application`."""
    return [route.spec(state) for route in ROUTES]
