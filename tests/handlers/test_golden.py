"""Exact bytes: `golden/NAME.request` goes in, `golden/NAME.reply` must come out.

A request file is a request without its framing headers; a reply file is status, content type, an
empty line and the body without its transfer coding. Changing what goes over the wire is changing
these files: MINDSTREAM_UPDATE_GOLDEN=1 writes the replies anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mindstream.handlers.testing import Reply, Server
from mindstream.handlers.triton_reply_fields import REPLY_FIELDS
from mindstream.plugin.backend import Limits, State
from mindstream.plugin.errors import BackendFailed, Overloaded, RequestError, RequestRefused
from mindstream.plugin.model_config import CompatConfig
from mindstream.plugin.request import Chunk, FinishReason
from mindstream.plugin.testing import Delay, Item

GOLDEN = Path(__file__).parent / "golden"
UPDATE = os.environ.get("MINDSTREAM_UPDATE_GOLDEN") == "1"


@dataclass(frozen=True)
class Case:
    """What the model does, and how the server is set up."""

    script: tuple[Item, ...] = ()
    serving: dict[str, Any] = field(default_factory=dict)
    limits: Limits | None = None
    submit_error: RequestError | None = None
    state: State = State.READY


def chunk(
    text: str, number: int, wait: int, time: float, last: FinishReason | None = None
) -> Chunk:
    prefill, decode = (time, None) if number == 1 else (None, time)
    return Chunk(tuple(text.encode()), number, 1, wait, prefill, decode, last)


# The chunks behind the documented samples.
SAMPLE_1 = (
    chunk("live", 1, 5082, 28),
    chunk(" in", 2, 36, 9),
    chunk(" Paris", 3, 30, 8),
    chunk(",", 4, 23, 7),
    chunk(" France", 5, 24, 7, FinishReason.LENGTH),
)
SAMPLE_2 = (
    chunk("'m", 1, 5092, 41.68000030517578),
    chunk(" from", 2, 43, 20.440000534057617),
    chunk(" France", 3, 27, 12.175999641418457),
    chunk(".", 4, 26, 12.128000259399414),
    chunk(" I", 5, 26, 12.458000183105469, FinishReason.LENGTH),
)
# A chunk that no codec can read: a fault of the server, whose text must not leave it.
FAULT = Chunk((72,), "secret", 1, 0)  # type: ignore[arg-type]  # the fault
BROKEN = BackendFailed("The engine process ended with signal 9.")
CASES = {
    # The documented samples.
    "stream_documented_1": Case(SAMPLE_1),
    "stream_documented_2_full_text": Case(SAMPLE_2, {"full_text_enabled": True}),
    "stream_documented_multimodal": Case(serving={"max_batch_size": 1}),
    "generate_documented": Case(SAMPLE_1),
    "infer_documented": Case((7, 8, 9, FinishReason.LENGTH)),
    # Forms of a reply.
    "stream_without_details": Case(SAMPLE_1),
    "generate_without_details": Case(SAMPLE_1),
    "stream_measured_costs": Case(SAMPLE_1, {"measured_costs": True}),
    "generate_measured_costs": Case(SAMPLE_1, {"measured_costs": True}),
    "stream_eos": Case((72, 105, 0, FinishReason.EOS)),
    "stream_invalid_flag": Case((72, FinishReason.INVALID)),
    "stream_non_ascii": Case(('é中😀\u2028\x85\n"\\\x01', FinishReason.LENGTH)),
    "stream_full_text_non_ascii": Case(
        ("é中😀e", *"😀".encode()[:3], FinishReason.LENGTH), {"full_text_enabled": True}
    ),
    "stream_cut_inside_a_character": Case((*"中".encode()[:2], FinishReason.LENGTH)),
    "stream_recompute": Case((67, 68, FinishReason.LENGTH), {"measured_costs": True}),
    "stream_versioned": Case((72, FinishReason.LENGTH)),
    # Before a stream opens.
    "error_model": Case(),
    "error_version": Case(),
    "error_route": Case(),
    "error_method": Case(),
    "error_json": Case(),
    "error_json_nan": Case(),
    "error_json_depth": Case(),
    "error_json_array": Case(),
    "error_id": Case(),
    "error_text_missing": Case(),
    "error_range": Case(),
    "error_type": Case(),
    "error_recompute": Case(),
    "error_recompute_times": Case(),
    "error_infer_shape": Case(),
    "error_infer_ids": Case(),
    "error_prompt_too_long": Case(limits=Limits(256, 8, 8)),
    "error_overloaded": Case(submit_error=Overloaded("The queue is full: 9 wait.", 3)),
    "error_stopped": Case(state=State.STOPPED),
    "error_first_token": Case((BROKEN,)),
    "error_generate_late": Case((72, BROKEN)),
    "error_no_finish_reason": Case((72,)),
    "error_too_large": Case(serving={"max_request_length": 1}),
    "error_id_in_use": Case(submit_error=RequestRefused("Runtime request has been used before.")),
    "error_token_timeout": Case((Delay(60),), {"token_timeout": 0.05}),
    "error_e2e_timeout": Case((72, Delay(60)), {"e2e_timeout": 0.05}),
    "error_unexpected": Case((FAULT,)),
    "error_media_null": Case(),
    "error_media_host": Case(),
    "error_media_content": Case(),
    "error_media_text_only": Case(),
    "error_stop_unknown": Case(),
    "error_stop_unknown_lenient": Case(serving={"validation": "lenient"}),
    "error_stop_no_id": Case(),
    "error_stop_null_id": Case(),
    # After it has opened.
    "error_stream_late": Case((72, BROKEN)),
    "error_stream_late_raw": Case((72, BROKEN), {"compat": CompatConfig(raw_error_text=True)}),
    "error_stream_no_finish_reason": Case((72,)),
    "error_stream_token_timeout": Case((72, Delay(60)), {"token_timeout": 0.05}),
    "error_stream_e2e_timeout": Case((72, Delay(60)), {"e2e_timeout": 0.05}),
    "error_stream_timeout_raw": Case(
        (72, Delay(60)), {"token_timeout": 0.05, "compat": CompatConfig(raw_error_text=True)}
    ),
    "error_stream_unexpected": Case((72, FAULT)),
    "error_stream_unexpected_raw": Case((72, FAULT), {"compat": CompatConfig(raw_error_text=True)}),
    # Metadata and health.
    "server": Case(),
    "model": Case(),
    "model_config": Case(),
    "model_slots": Case(),
    "model_ready": Case(),
    "model_ready_failed": Case(state=State.FAILED),
    "models": Case(),
    "live_busy": Case(state=State.BUSY),
    "live_failed": Case(state=State.FAILED),
    "ready_busy": Case(state=State.BUSY),
    "ready_restarting": Case(state=State.RESTARTING),
    "health_stopped": Case(state=State.STOPPED),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_bytes(name: str, start_server: Callable[..., Server]) -> None:
    case = CASES[name]
    server = start_server(case.limits, **case.serving)
    if case.script:
        server.backend.enqueue(*case.script)
    server.backend.submit_error = case.submit_error
    server.backend.state = case.state
    reply = as_file(server.exchange(framed((GOLDEN / f"{name}.request").read_bytes())))
    file = GOLDEN / f"{name}.reply"
    if UPDATE:
        file.write_bytes(reply)
    assert reply == file.read_bytes()


def test_every_file_has_a_case() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == set(CASES)


def test_the_documented_samples_differ_only_in_what_the_documents_say() -> None:
    """Sample 1 prints its times as integers, its third event has a left-over `[3681,8]],`, and
    sample 2 prints the float32 of each time in full: the same numbers to a microsecond."""
    ours = (GOLDEN / "stream_documented_1.reply").read_text().partition("\n\n")[2]
    assert ours.replace(".0}", "}").replace(".0,", ",") == (
        'data:{"id":"a123","model_name":"echo","model_version":null,"text_output":"live","details":'
        '{"generated_tokens":1,"first_token_cost":null,"decode_cost":null,"batch_size":1,'
        '"queue_wait_time":5082},"prefill_time":28,"decode_time":null}\n\n'
        'data:{"id":"a123","model_name":"echo","model_version":null,"text_output":" in","details":'
        '{"generated_tokens":2,"first_token_cost":null,"decode_cost":null,"batch_size":1,'
        '"queue_wait_time":36},"prefill_time":null,"decode_time":9}\n\n'
        'data:{"id":"a123","model_name":"echo","model_version":null,"text_output":" Paris",'
        '"details":{"generated_tokens":3,"first_token_cost":null,"decode_cost":null,"batch_size":1,'
        '"queue_wait_time":30},"prefill_time":null,"decode_time":8}\n\n'
        'data:{"id":"a123","model_name":"echo","model_version":null,"text_output":",","details":'
        '{"generated_tokens":4,"first_token_cost":null,"decode_cost":null,"batch_size":1,'
        '"queue_wait_time":23},"prefill_time":null,"decode_time":7}\n\n'
        'data:{"id":"a123","model_name":"echo","model_version":null,"text_output":" France",'
        '"details":{"finish_reason":"length","generated_tokens":5,"first_token_cost":null,'
        '"decode_cost":null,"batch_size":1,"queue_wait_time":24},"prefill_time":null,'
        '"decode_time":7}\n\n'
    )


def test_the_reply_table_names_every_key_in_its_order() -> None:
    event = (GOLDEN / "stream_documented_1.reply").read_text().rpartition("data:")[2]
    keys: list[str] = []
    for key, value in json.loads(event).items():
        keys += [key, *(f"{key}.{inner}" for inner in value)] if key == "details" else [key]
    assert keys == [row.name for row in REPLY_FIELDS]


def framed(request: bytes) -> bytes:
    """Adds what makes it a request on a connection of its own."""
    head, _, body = request.partition(b"\n\n")
    lines = [*head.split(b"\n"), b"Host: test", b"Connection: close"]
    if b"Content-Length" not in head:  # a request that announces more than it sends has its own
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def as_file(reply: Reply) -> bytes:
    head = [str(reply.status), reply.headers.get("content-type", "no content type")]
    if "retry-after" in reply.headers:
        head.append(f"Retry-After: {reply.headers['retry-after']}")
    return "\n".join([*head, "", ""]).encode() + reply.body
