"""What the Triton routes do beyond their bytes: limits, stop calls, time limits, recompute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mindstream.handlers.testing import Reply, Server, eventually
from mindstream.plugin.backend import Limits
from mindstream.plugin.errors import Overloaded
from mindstream.plugin.request import FinishReason
from mindstream.plugin.testing import Delay

STOP = "/v2/models/echo/stopInfer"
GOOD_TENSOR = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [1, 2, 3]}


class Background:
    """A request that runs while the test goes on."""

    def __init__(self, call: Callable[[], Reply]) -> None:
        self._reply: Reply | None = None

        def run() -> None:
            self._reply = call()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def reply(self) -> Reply:
        self._thread.join(timeout=20)
        assert self._reply is not None
        return self._reply


def waiting(server: Server, *before: int) -> Any:
    """The next request gives the tokens `before` and then waits; returns what lets it go on."""
    gate = server.thread.call(server.backend.gate)
    server.backend.enqueue(*before, gate, 33, FinishReason.LENGTH)
    return lambda: server.thread.loop.call_soon_threadsafe(gate.set)


def test_every_parameter_arrives(server: Server) -> None:
    server.generate(
        {
            "id": "r",
            "text_input": "ab",
            "parameters": {
                "do_sample": True,
                "max_new_tokens": 7,
                "repetition_penalty": 1.25,
                "seed": 2**64 - 1,
                "temperature": 2,
                "top_p": 0.5,
                "typical_p": 0.25,
                "watermark": True,
                "priority": 2,
            },
        }
    )
    request = server.backend.requests[0]
    assert (request.request_id, request.prompt_ids) == ("r", (97, 98))
    assert (request.max_new_tokens, request.priority) == (7, 2)
    sampling = request.sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_p) == (True, 2.0, 0.5)
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.25, 1.25)
    assert (sampling.watermark, sampling.seed) == (True, 2**64 - 1)


def test_absent_parameters(server: Server) -> None:
    server.generate({"text_input": "ab"})
    server.generate({"text_input": "ab"})
    first, second = server.backend.requests
    assert (first.max_new_tokens, first.priority) == (20, 5)
    assert not first.sampling.do_sample
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id == "endpoint_common_0"


@pytest.mark.parametrize(
    ("parameters", "sampled"),
    [
        ({}, False),
        ({"seed": 5}, False),
        ({"repetition_penalty": 2}, False),
        ({"watermark": True}, False),
        ({"temperature": 1}, True),
        ({"top_k": 1}, True),
        ({"top_p": 1}, True),
        ({"typical_p": 1}, True),
        ({"temperature": 1, "do_sample": False}, False),
        ({"temperature": 1, "do_sample": None}, True),
        ({"do_sample": True}, True),
    ],
)
def test_absent_do_sample_is_decided_by_the_others(
    server: Server, parameters: dict[str, Any], sampled: bool
) -> None:
    server.generate({"text_input": "x", "parameters": parameters})
    assert server.backend.requests[0].sampling.do_sample is sampled


@pytest.mark.parametrize(
    ("wanted", "limits", "iterations", "given"),
    [(5, 100, 50, 5), (2147483647, 100, 50, 50), (2147483647, 20, 50, 17), (18, 20, 50, 17)],
)
def test_max_new_tokens_is_cut(
    start_server: Callable[..., Server], wanted: int, limits: int, iterations: int, given: int
) -> None:
    server = start_server(Limits(256, limits, 8), max_iter_times=iterations)
    body = {"text_input": "abc", "parameters": {"max_new_tokens": wanted}}
    assert server.generate(body).status == 200
    assert server.backend.requests[0].max_new_tokens == given


def test_the_longest_prompt(start_server: Callable[..., Server]) -> None:
    server = start_server(Limits(256, 8, 8))
    assert server.generate({"text_input": "1234567"}).json()["text_output"] == "1"
    assert server.generate({"text_input": "12345678"}).status == 424


def test_a_running_id_is_refused(server: Server) -> None:
    release = waiting(server)
    running = Background(lambda: server.generate({"id": "same", "text_input": "x"}))
    eventually(lambda: server.service.is_running("same"))
    for send in (server.generate, server.stream):
        refused = send({"id": "same", "text_input": "x"})
        assert (refused.status, refused.json()) == (
            424,
            {
                "error": "Failed to enqueue inferRequest. Runtime request has been used before.",
                "error_type": "Generation Error",
            },
        )
    release()
    assert running.reply().status == 200
    assert server.generate({"id": "same", "text_input": "x"}).status == 200


def test_an_id_that_a_client_took_is_not_given_again(server: Server) -> None:
    release = waiting(server)
    running = Background(lambda: server.generate({"id": "endpoint_common_0", "text_input": "x"}))
    eventually(lambda: server.service.is_running("endpoint_common_0"))
    assert server.generate({"text_input": "x"}).json()["id"] == "endpoint_common_1"
    release()
    running.reply()


def test_a_stop_call_ends_a_stream(server: Server) -> None:
    waiting(server, 72, 0xC3)
    body = {"id": "s", "text_input": "x", "parameters": {"details": True}}
    running = Background(lambda: server.stream(body))
    eventually(lambda: server.service.is_running("s"))
    stopped = server.send("POST", STOP, {"id": "s"})
    assert (stopped.status, stopped.body) == (200, b'{"id":"s"}')
    *_, last = running.reply().events()
    assert last["details"]["finish_reason"] == "stop_sequence"
    assert server.send("POST", STOP, {"id": "s"}).status == 404


def test_a_stop_call_ends_a_plain_request_with_its_text_so_far(server: Server) -> None:
    waiting(server, 72, 105)
    body = {"id": "s", "text_input": "x", "parameters": {"details": True}}
    running = Background(lambda: server.generate(body))
    eventually(lambda: server.service.is_running("s"))
    assert server.send("POST", STOP, {"id": "s"}).status == 200
    reply = running.reply().json()
    assert reply["details"]["finish_reason"] == "stop_sequence"
    assert reply["details"]["generated_tokens"] == len(reply["details"]["batch_size"])


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"{", 422, "Failed to parse request context to json"),
        ({"id": "a b"}, 422, "The id can contain only"),
        ({"id": 5}, 422, "id must be string type."),
    ],
)
def test_stop_calls_refused(server: Server, body: Any, status: int, error: str) -> None:
    reply = server.send("POST", STOP, body)
    assert (reply.status, reply.json()["error"][: len(error)]) == (status, error)


def test_time_limits_before_and_after_the_first_token(start_server: Callable[..., Server]) -> None:
    server = start_server(token_timeout=0.05)
    server.backend.enqueue(Delay(20), 72, FinishReason.LENGTH)
    server.backend.enqueue(72, Delay(20), FinishReason.LENGTH)
    server.backend.enqueue(72, Delay(20), FinishReason.LENGTH)
    told = {
        "error": "Engine callback timeout: server tokenTimeout",
        "error_type": "Incomplete Generation",
    }
    early = server.stream({"id": "t", "text_input": "x"})
    assert (early.status, early.json()) == (500, told)
    late = server.stream({"id": "t", "text_input": "x"})
    assert (late.status, late.events()[-1]) == (200, {"id": "t", **told})
    plain = server.generate({"id": "t", "text_input": "x"})
    assert (plain.status, plain.json()) == (500, told)
    assert server.backend.cancelled == ["t", "t", "t"]


def test_the_clients_timeout_is_kept(server: Server) -> None:
    server.backend.enqueue(72, Delay(20), FinishReason.LENGTH)
    reply = server.generate({"text_input": "x", "parameters": {"timeout": 1}})
    assert reply.json()["error"] == "Engine callback timeout: client timeout"


def test_a_full_server_says_when_to_come_back(server: Server) -> None:
    server.backend.submit_error = Overloaded("The queue is full.", 7)
    for send in (server.generate, server.stream):
        reply = send({"text_input": "x"})
        assert (reply.status, reply.headers["retry-after"]) == (503, "7")


def recompute(server: Server, text: str, parameters: dict[str, Any]) -> Reply:
    body = {"text_input": text, "parameters": {"details": True, **parameters}}
    return server.stream(body, is_recompute="true")


def test_recompute_goes_on_where_it_was(server: Server) -> None:
    """Two prompt tokens, three generated: "é" began with the last of them."""
    server.backend.enqueue(0xA9, 33, FinishReason.LENGTH)
    times = {"firstTokenCost": 5, "decodeTime": [6, 7], "max_new_tokens": 5}
    events = recompute(server, "2,72,105,65,66,195", times).events()
    request = server.backend.requests[0]
    assert request.prompt_ids == (72, 105, 65, 66, 195)
    assert (request.generated_before, request.max_new_tokens) == (3, 5)
    assert [event["details"]["generated_tokens"] for event in events] == [4, 5]
    assert [event["text_output"] for event in events] == ["é", "!"]


@pytest.mark.parametrize(
    ("text", "parameters", "error"),
    [
        ("", {}, "text_input must be necessary"),
        ("1", {}, "token length must be in (0, 1048576], but got 0"),
        ("0,5", {}, "0 prompt tokens"),
        ("3,5,6", {}, "3 prompt tokens"),
        ("1,5,x", {}, "decimal digits"),
        ("1,5,-6", {}, "decimal digits"),
        ("1,5,٣", {}, "decimal digits"),
        ("1,5,99999999999", {}, "decimal digits"),
        ("1,5,6", {}, "firstTokenCost is required"),
        ("1,5,6", {"firstTokenCost": 1, "decodeTime": [1]}, "decodeTime length is invalid"),
        ("1,5,6,7", {"firstTokenCost": 1}, "decodeTime length is invalid"),
        ("1,5,6", {"firstTokenCost": 1, "max_new_tokens": 1}, "1 tokens were generated before"),
    ],
)
def test_recompute_refused(
    server: Server, text: str, parameters: dict[str, Any], error: str
) -> None:
    reply = recompute(server, text, parameters)
    assert reply.status == 422
    assert error in reply.json()["error"]


def test_recompute_with_an_unknown_id(server: Server) -> None:
    assert recompute(server, "1,256", {}).status == 424


def test_without_the_header_digits_are_text(server: Server) -> None:
    assert server.generate({"text_input": "1,2"}).json()["text_output"] == "1,2"


def test_infer_null_is_absent_in_both_places(server: Server) -> None:
    tensor = {**GOOD_TENSOR, "parameters": {"max_new_tokens": None}}
    outer = {"max_new_tokens": 2, "top_k": None}
    body = {"inputs": [tensor], "outputs": [{"name": "output0"}], "parameters": outer}
    reply = server.send("POST", "/v2/models/echo/infer", body)
    assert reply.json()["outputs"][0]["shape"] == [1, 2]


@pytest.mark.parametrize("place", ["body", "input"])
def test_infer_reads_parameters_in_both_places(server: Server, place: str) -> None:
    tensor: dict[str, Any] = {
        "name": "input0",
        "shape": [3],
        "datatype": "UINT32",
        "data": [1, 2, 3],
    }
    body: dict[str, Any] = {"id": "i", "inputs": [tensor], "outputs": [{"name": "output0"}]}
    (body if place == "body" else tensor)["parameters"] = {"max_new_tokens": 2}
    reply = server.send("POST", "/v2/models/echo/infer", body)
    assert reply.json()["outputs"][0] == {
        "name": "output0",
        "shape": [1, 2],
        "datatype": "UINT32",
        "data": [1, 2],
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"inputs": None}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [GOOD_TENSOR, GOOD_TENSOR]}, "inputs"),
        ({"inputs": [5]}, "inputs"),
        ({"inputs": [{**GOOD_TENSOR, "name": ""}]}, "inputs[0].name"),
        ({"inputs": [{**GOOD_TENSOR, "name": "x" * 257}]}, "inputs[0].name"),
        ({"inputs": [{**GOOD_TENSOR, "name": 5}]}, "inputs[0].name"),
        ({"inputs": [{**GOOD_TENSOR, "shape": [3, 1]}]}, "inputs[0].shape"),
        ({"inputs": [{**GOOD_TENSOR, "shape": 3}]}, "inputs[0].shape"),
        ({"inputs": [{**GOOD_TENSOR, "shape": [3.0]}]}, "inputs[0].shape"),
        ({"inputs": [{**GOOD_TENSOR, "shape": [True, 3]}]}, "inputs[0].shape"),
        ({"inputs": [{**GOOD_TENSOR, "datatype": "INT64"}]}, "inputs[0].datatype"),
        ({"inputs": [{**GOOD_TENSOR, "data": []}]}, "inputs[0].data"),
        ({"inputs": [{**GOOD_TENSOR, "data": [1, 2, True]}]}, "inputs[0].data"),
        ({"inputs": [{**GOOD_TENSOR, "data": [1, 2, -1]}]}, "inputs[0].data"),
        ({"inputs": [{**GOOD_TENSOR, "data": [1, 2, 2**32]}]}, "inputs[0].data"),
        ({"inputs": [{**GOOD_TENSOR, "data": "123"}]}, "inputs[0].data"),
        ({"outputs": None}, "outputs"),
        ({"outputs": []}, "outputs"),
        ({"parameters": 5}, "parameters"),
        ({"parameters": {"top_k": 0}}, "top_k"),
    ],
)
def test_infer_refused(server: Server, change: dict[str, Any], field: str) -> None:
    body = {"inputs": [GOOD_TENSOR], "outputs": [{"name": "output0"}], **change}
    reply = server.send("POST", "/v2/models/echo/infer", body)
    assert reply.status == 422
    assert field in reply.json()["error"]
