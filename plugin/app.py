"""The HTTP application: on its own, or its routes inside somebody's `tornado.web.Application`.

service = open_service(load_deployment("echo"))
await service.start()
app = tornado.web.Application([*my_handlers, *routes([service])])
"""

from __future__ import annotations

from collections.abc import Iterable

from tornado.httpserver import HTTPServer
from tornado.routing import URLSpec
from tornado.web import Application

from mindstream.handlers.base import UnknownRoute
from mindstream.handlers.routes import route_specs
from mindstream.handlers.state import ServerState
from mindstream.plugin.service import ModelService

# Seconds; the real server's keep-alive and the time a request body may take as a whole.
_IDLE_TIMEOUT = 60.0
_BODY_TIMEOUT = 600.0


def routes(services: Iterable[ModelService]) -> list[URLSpec]:
    """Every route over the started `services`. An unknown path is left to the application."""
    return route_specs(ServerState(services))


def make_app(services: Iterable[ModelService]) -> Application:
    """The whole server: every route, and a JSON 404 for everything else."""
    state = ServerState(services)
    return Application(
        list(route_specs(state)),
        default_handler_class=UnknownRoute,
        default_handler_args={"state": state},
        mindstream_state=state,
    )


def is_writing(app: Application) -> bool:
    """Whether a client of `make_app`'s has not yet taken all that was written to it."""
    state: ServerState = app.settings["mindstream_state"]
    return state.is_writing


def make_server(app: Application) -> HTTPServer:
    """An HTTP server with the time limits that keep idle and stuck connections from piling up."""
    return HTTPServer(app, idle_connection_timeout=_IDLE_TIMEOUT, body_timeout=_BODY_TIMEOUT)
