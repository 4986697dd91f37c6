"""What all handlers of one application share: the served models, the request ids, the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import count
from weakref import WeakSet

from tornado.iostream import IOStream

from mindstream.handlers.metrics import Metrics
from mindstream.plugin.backend import State
from mindstream.plugin.errors import NotFound, Overloaded, ServiceStopped
from mindstream.plugin.service import ModelService

# A deployment has no versions of its own; "1" is the name of its only one, as Triton counts.
MODEL_VERSION = "1"
# What clients of the replaced server find where it names itself.
WIRE_NAME = "MindIE Server"


class ServerState:
    """The served models by name, in the order given. Event loop only."""

    def __init__(self, services: Iterable[ModelService]) -> None:
        self.services: dict[str, ModelService] = {}
        for service in services:
            if service.name in self.services:
                raise ValueError(f"two models are served as {service.name!r}")
            self.services[service.name] = service
        if not self.services:
            raise ValueError("at least one model must be served")
        self.metrics = Metrics(self.services)
        self.created = int(time.time())  # seconds since 1970
        self._numbers = count()
        self._connections: WeakSet[IOStream] = WeakSet()

    def answers_on(self, connection: IOStream) -> None:
        """A request came in there."""
        self._connections.add(connection)

    @property
    def is_writing(self) -> bool:
        """Whether a client has not yet taken all that was written to it."""
        return any(connection.writing() for connection in self._connections)

    def model(self, name: str, version: str | None = None) -> ModelService:
        """The model of a URL, or NotFound."""
        service = self.services.get(name)
        if service is None:
            raise NotFound(f"Model {name} not found.")
        if version not in (None, MODEL_VERSION):
            raise NotFound(f"Model {name} version {version} not found.")
        return service

    def new_request_id(self) -> str:
        """`endpoint_common_N`, counted from 0; one that a client has taken is left out."""
        services = self.services.values()
        while True:
            request_id = f"endpoint_common_{next(self._numbers)}"
            if not any(service.is_running(request_id) for service in services):
                return request_id

    def max_body_bytes(self, name: str | None) -> int:
        """The body limit of a model; of an unknown one or none, the largest of all."""
        known = self.services.get(name or "")
        chosen = [known] if known else self.services.values()
        return max(each.deployment.serving.max_request_length for each in chosen) * 2**20

    def max_json_depth(self, name: str | None) -> int:
        """The nesting limit of a model; of an unknown one or none, the largest of all."""
        known = self.services.get(name or "")
        chosen = [known] if known else self.services.values()
        return max(each.deployment.serving.max_json_depth for each in chosen)


def require_running(service: ModelService) -> None:
    """Raises ServiceStopped or Overloaded if the model does not take requests any more or yet."""
    state = service.status().state
    if state is State.STOPPED:
        raise ServiceStopped("The service has been stopped")
    if state is State.STARTING:
        raise Overloaded(f"The model {service.name} is still loading.")
