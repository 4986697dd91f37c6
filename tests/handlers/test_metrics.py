"""GET /metrics over a socket, read by the client library's own parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mindstream.handlers.testing import LoopThread, Server, eventually, request_bytes
from mindstream.plugin.backend import BackendStatus, State
from mindstream.plugin.errors import BackendFailed, Overloaded
from mindstream.plugin.request import FinishReason
from mindstream.plugin.testing import ScriptedBackend

# The real server's, in its order.
BUCKETS = {
    "time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10",
    "time_per_output_token_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5",
    "e2e_request_latency_seconds": "1 2.5 5 10 15 20 30 40 50 60",
    "request_prompt_tokens": "10 50 100 200 500 1000 2000 5000 10000"
    " 16000 20000 32000 50000 64000 128000",
    "request_generation_tokens": "10 50 100 200 500 1000 2000 5000 10000"
    " 16000 20000 32000 50000 64000 128000",
}


def scrape(server: Server, model: str = "echo") -> dict[str, float]:
    """Sample name, with the bound of a bucket behind a space -> value."""
    reply = server.send("GET", "/metrics")
    assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    return {
        " ".join([sample.name, *filter(None, [sample.labels.get("le")])]): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
        if sample.labels["model_name"] == model
    }


def test_requests_are_counted_by_how_they_end(server: Server) -> None:
    server.generate({"text_input": "abc"})
    server.stream({"text_input": "abcd"})
    server.generate({"text_input": "abc", "parameters": {"top_k": -1}})
    server.generate(b"no JSON")
    server.backend.enqueue(72, BackendFailed("broke"))
    server.stream({"text_input": "abc"})  # status 200, and an error event
    server.backend.submit_error = Overloaded("full")
    server.stream({"text_input": "abc"})
    server.send("POST", "/v2/models/nope/generate", {"text_input": "abc"})  # of no model
    found = scrape(server)
    assert found["request_received_total"] == 6
    assert found["request_success_total"] == 2
    assert found["request_failed_total"] == 4
    assert found["failed_request_perc"] == pytest.approx(4 / 6)


def test_a_client_that_left_is_no_failure(server: Server) -> None:
    server.backend.enqueue(72, server.thread.call(server.backend.gate))
    path = "/v2/models/echo/generate_stream"
    with server.connect() as connection:
        connection.sendall(request_bytes("POST", path, {"text_input": "x"}))
        connection.recv(65536)
    eventually(lambda: bool(server.backend.cancelled))
    found = scrape(server)
    assert found["request_received_total"] == 1
    assert found["request_success_total"] == found["request_failed_total"] == 0
    assert found["e2e_request_latency_seconds_count"] == 0
    assert found["time_to_first_token_seconds_count"] == 1  # it had its first token


def test_times_and_lengths(server: Server) -> None:
    """The scripted backend says 1.5 ms to the first token and 0.5 ms to each other one."""
    server.stream({"text_input": "x" * 60})
    server.generate({"text_input": "x" * 3})
    tensor = {"name": "i", "shape": [2], "datatype": "UINT32", "data": [1, 2]}
    server.backend.enqueue(1, 2, 3, 4, FinishReason.EOS)
    server.send("POST", "/v2/models/echo/infer", {"inputs": [tensor], "outputs": [{"name": "o"}]})
    found = scrape(server)
    assert found["time_to_first_token_seconds_count"] == 3
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(0.0045)
    assert found["time_to_first_token_seconds_bucket 0.001"] == 0
    assert found["time_to_first_token_seconds_bucket 0.005"] == 3
    generated = found["request_generation_tokens_sum"]
    assert found["time_per_output_token_seconds_count"] == generated - 3
    assert found["time_per_output_token_seconds_sum"] == pytest.approx((generated - 3) * 0.0005)
    assert found["request_prompt_tokens_sum"] == 60 + 3 + 2
    assert found["request_prompt_tokens_bucket 10"] == 2
    assert found["request_prompt_tokens_bucket 50"] == 2
    assert found["request_prompt_tokens_bucket 100"] == 3
    assert found["e2e_request_latency_seconds_bucket +Inf"] == 3


def test_buckets_are_those_of_the_real_server(server: Server) -> None:
    found = scrape(server)
    for name, bounds in BUCKETS.items():
        start = f"{name}_bucket "
        shown = [key.removeprefix(start) for key in found if key.startswith(start)]
        assert shown.pop() == "+Inf"
        assert [float(bound) for bound in shown] == [float(bound) for bound in bounds.split()]


def test_the_backend_is_asked_for_the_rest(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    status = BackendStatus(
        State.READY,
        running=3,
        waiting=7,
        free_blocks=25,
        total_blocks=100,
        preemptions=4,
        prefix_query_tokens=800,
        prefix_hit_tokens=600,
        prompt_tokens=900,
        generated_tokens=50,
    )
    monkeypatch.setattr(server.backend, "status", lambda: status)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 7,
        "num_requests_swapped": 0,
        "num_preemptions_total": 4,
        "prompt_tokens_total": 900,
        "generation_tokens_total": 50,
        "npu_cache_usage_perc": 0.75,
        "cpu_cache_usage_perc": 0,
        "npu_prefix_cache_hit_rate": 0.75,
        "all_radix_match_num": 800,
        "npu_radix_match_hit_num": 600,
    }
    found = scrape(server)
    assert {name: found[name] for name in expected} == expected
    assert found["avg_prompt_throughput_toks_per_s"] > 0
    assert found["avg_generation_throughput_toks_per_s"] > 0
    later = replace(status, generated_tokens=60)
    monkeypatch.setattr(server.backend, "status", lambda: later)
    assert scrape(server)["avg_generation_throughput_toks_per_s"] > 0


def test_an_idle_model_has_no_rates_out_of_nothing(server: Server) -> None:
    found = scrape(server)
    for name in ("failed_request_perc", "npu_prefix_cache_hit_rate", "npu_cache_usage_perc"):
        assert found[name] == 0


@pytest.mark.parametrize("state", list(State))
def test_it_answers_in_every_state(start_server: Callable[..., Server], state: State) -> None:
    server = start_server()
    server.backend.state = state
    assert "request_received_total" in scrape(server)


def test_each_application_has_its_own_and_each_model_a_label(loop_thread: LoopThread) -> None:
    two = Server(loop_thread, ScriptedBackend(), other=ScriptedBackend())
    one = Server(loop_thread, ScriptedBackend())
    try:
        two.send("POST", "/v2/models/other/generate", {"text_input": "x"})
        assert scrape(two, "other")["request_success_total"] == 1
        assert scrape(two, "echo")["request_success_total"] == 0
        one.generate({"text_input": "x"})
        assert scrape(one, "echo")["request_success_total"] == 1
        assert scrape(one, "other") == {}
    finally:
        two.close()
        one.close()
