"""Every route of the table, versions, unknown routes, health in every state, embedding, the log."""

from __future__ import annotations

import gzip
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from mindstream.handlers.protocol_docs import render
from mindstream.handlers.routes import ROUTES, Route
from mindstream.handlers.state import ServerState
from mindstream.handlers.testing import (
    LoopThread,
    Reply,
    Server,
    eventually,
    read_reply,
    request_bytes,
)
from mindstream.plugin.app import routes
from mindstream.plugin.backend import State
from mindstream.plugin.testing import ScriptedBackend, scripted_service

BODIES = {
    "generate": {"text_input": "x"},
    "generate_stream": {"text_input": "x"},
    "infer": {
        "inputs": [{"name": "i", "shape": [1], "datatype": "UINT32", "data": [1]}],
        "outputs": [{"name": "o"}],
    },
    "stopInfer": {"id": "none"},
}


def path_of(route: Route, version: str = "", model: str = "echo") -> str:
    return route.path.replace("{m}", model).replace("{v}", version)


def body_of(route: Route) -> object:
    return BODIES[route.path.rpartition("/")[2]] if route.method == "POST" else None


every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)


@every_route
def test_every_route_answers(server: Server, route: Route) -> None:
    reply = server.send(route.method, path_of(route), body_of(route))
    assert reply.status == (404 if "stopInfer" in route.path else 200)
    assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["requestuuid"])
    if "stopInfer" not in route.path:
        other = {"GET": "POST", "POST": "GET"}[route.method]
        unknown = server.send(other, path_of(route), {} if other == "POST" else None)
        assert (unknown.status, unknown.json()["error_type"]) == (404, "NotFoundError")


@every_route
def test_a_get_route_answers_head(server: Server, route: Route) -> None:
    raw = request_bytes("HEAD", path_of(route))
    with server.connect() as connection:
        connection.sendall(raw)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    status = 200 if route.method == "GET" else 404
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())
    assert reply.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("route", [r for r in ROUTES if "{v}" in r.path], ids=lambda r: r.path)
def test_versions(server: Server, route: Route) -> None:
    deployed = server.send(route.method, path_of(route, "/versions/1"), body_of(route))
    assert deployed.status == (404 if "stopInfer" in route.path else 200)
    for version in ("2", "01", "x", "%20"):
        path = path_of(route, f"/versions/{version}")
        reply = server.send(route.method, path, body_of(route))
        assert reply.status == 404
        assert re.match(r"Model echo version .* not found\.", reply.json()["error"])


@pytest.mark.parametrize("route", [r for r in ROUTES if "{m}" in r.path], ids=lambda r: r.path)
def test_unknown_models(server: Server, route: Route) -> None:
    for model in ("nope", "%00", "Echo", "e%C3%A9"):
        reply = server.send(route.method, path_of(route, model=model), b"not even JSON")
        assert reply.status == 404
        assert reply.json()["error_type"] == "NotFoundError"


@pytest.mark.parametrize(
    "path",
    ["/", "/nope", "/v2/", "/v2/models", "/v2/models/echo/", "/v2/models/echo/versions/1/", "//v2"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_unknown_routes(server: Server, method: str, path: str) -> None:
    reply = server.send(method, path)
    assert (reply.status, reply.headers["content-type"]) == (404, "application/json")
    assert list(reply.json()) == ["error", "error_type"]


def test_a_path_that_is_no_text_is_a_bad_request(server: Server) -> None:
    reply = server.send("GET", "/v2/models/%FF")
    assert (reply.status, reply.json()["error_type"]) == (400, "Bad Request")


@pytest.mark.parametrize(
    ("state", "live", "ready", "model"),
    [
        (State.READY, 200, 200, 200),
        (State.BUSY, 200, 503, 503),
        (State.STARTING, 200, 503, 503),
        (State.RESTARTING, 200, 503, 503),
        (State.FAILED, 500, 500, 500),
        (State.STOPPED, 503, 503, 503),
    ],
)
def test_health(server: Server, state: State, live: int, ready: int, model: int) -> None:
    server.backend.state = state
    assert server.send("GET", "/v2/health/live").status == live
    assert server.send("GET", "/v2/health/ready").status == ready
    assert server.send("GET", "/v2/models/echo/ready").status == model
    assert server.send("GET", "/health").status == model


def test_a_stopped_service_refuses_after_model_and_json(server: Server) -> None:
    server.backend.state = State.STOPPED
    assert server.send("POST", "/v2/models/nope/generate", {}).status == 404
    assert server.generate(b"{").status == 422
    assert server.generate({"id": "!"}).status == 503
    assert server.generate({"text_input": "x"}).json()["error"] == "The service has been stopped"


class Hello(RequestHandler):
    """A handler of somebody else."""

    def get(self) -> None:
        self.write("hello")


@pytest.fixture(params=[False, True])
def embedded_in(
    loop_thread: LoopThread, request: pytest.FixtureRequest
) -> Iterator[tuple[int, bool]]:
    """A foreign application with our routes among its own: its port, and whether it compresses."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def start() -> HTTPServer:
        service = scripted_service(ScriptedBackend())
        await service.start()
        application = Application(
            [(r"/hello", Hello), *routes([service])], compress_response=request.param
        )
        server = HTTPServer(application)
        server.add_sockets([listener])
        return server

    async def stop() -> None:
        server.stop()
        await server.close_all_connections()

    server = loop_thread.run(start())
    yield listener.getsockname()[1], request.param
    loop_thread.run(stop())


def test_routes_inside_a_foreign_application(embedded_in: tuple[int, bool]) -> None:
    port, compresses = embedded_in

    def send(raw: bytes) -> Reply:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(raw)
            return read_reply(connection)

    assert send(request_bytes("GET", "/hello")).body == b"hello"
    asked = {"id": "a", "text_input": "xyz"}, {"Accept-Encoding": "gzip"}
    reply = send(request_bytes("POST", "/v2/models/echo/generate_stream", *asked))
    assert reply.status == 200
    assert (reply.headers.get("content-encoding") == "gzip") == compresses
    body = gzip.decompress(reply.body) if compresses else reply.body
    start = b'data:{"id":"a","model_name":"echo","model_version":null,"text_output":'
    assert body == b"".join(start + b'"%b"}\n\n' % text for text in (b"x", b"y", b"z"))
    reply = send(request_bytes("GET", "/nope"))
    assert (reply.status, b"error_type" in reply.body) == (404, False)


def test_a_model_that_still_loads_says_so(loop_thread: LoopThread) -> None:
    """Its limits are not known yet; nothing may stumble over that."""
    server = Server(loop_thread, ScriptedBackend(), start=False)
    try:
        for route in ROUTES:
            reply = server.send(route.method, path_of(route), body_of(route))
            loading = reply.status == 503 and "retry-after" in reply.headers
            assert loading or reply.status == (503 if "ready" in route.path else 200), route.path
        assert server.generate({"text_input": "x"}).json() == {
            "error": "The model echo is still loading.",
            "error_type": "Service Unavailable",
        }
    finally:
        server.close()


def test_a_path_cannot_write_into_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with server.connect() as connection:
        connection.sendall(b"GET /a\x1b[31m\x85b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while connection.recv(65536):
            pass
    assert "\x1b" not in caplog.text
    assert "\x85" not in caplog.text


def test_two_models_in_one_application(loop_thread: LoopThread) -> None:
    server = Server(loop_thread, ScriptedBackend(), other=ScriptedBackend())
    try:
        for name, backend in (("echo", server.backend), ("other", server.other)):
            assert backend is not None
            reply = server.send("POST", f"/v2/models/{name}/generate", {"text_input": "x"})
            assert reply.json()["model_name"] == name
            assert len(backend.requests) == 1
        names = [entry["id"] for entry in server.send("GET", "/v1/models").json()["data"]]
        assert names == ["echo", "other"]
        server.backend.state = State.FAILED
        assert server.send("GET", "/v2/health/ready").status == 500
        assert server.send("GET", "/v2/models/other/ready").status == 200
    finally:
        server.close()


def test_models_of_one_name_are_a_fault_of_the_caller() -> None:
    service = scripted_service(ScriptedBackend())
    with pytest.raises(ValueError, match="two models are served as 'echo'"):
        ServerState([service, service])
    with pytest.raises(ValueError, match="at least one model"):
        ServerState([])


def test_one_line_a_request_and_no_prompt_in_it(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.generate({"id": "logged", "text_input": "my secret"})
    server.stream({"text_input": "my secret", "parameters": {"top_k": -1}})
    server.send("GET", "/v2?token=secret")

    def lines() -> list[str]:
        messages = [r.getMessage() for r in caplog.records if r.name == "mindstream.access"]
        return [re.sub(r"[\d.]+ ms$", "T ms", message) for message in messages]

    eventually(lambda: len(lines()) == 3)
    assert lines() == [
        "logged POST /v2/models/echo/generate 200 T ms",
        "endpoint_common_0 POST /v2/models/echo/generate_stream 422 T ms",
        "- GET /v2 200 T ms",
    ]
    assert "secret" not in caplog.text


def test_the_configuration_names_the_source_of_every_default(server: Server) -> None:
    config = server.send("GET", "/v2/models/echo/config").json()
    assert list(config)[:9] == [
        "model_name",
        "input_datatype",
        "output_datatype",
        "max_seq_len",
        "npu_mem_size",
        "cpu_mem_size",
        "world_size",
        "model_weight_path",
        "model_instance_type",
    ]
    names = {"do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"}
    assert names <= set(config["defaults"])
    assert all(set(entry) == {"value", "source"} for entry in config["defaults"].values())


def test_the_model_list_is_sorted_and_indented(server: Server) -> None:
    reply = server.send("GET", "/v1/models")
    listed = reply.json()
    assert reply.body.decode() == json.dumps(listed, indent=4, sort_keys=True)
    assert [entry["id"] for entry in listed["data"]] == ["echo"]


def test_the_protocol_document_is_made_from_the_tables() -> None:
    document = Path(__file__).parents[2] / "docs" / "protocol.md"
    assert document.read_text(encoding="utf-8") == render(), (
        "run `python -m mindstream.handlers.protocol_docs > docs/protocol.md`"
    )
