"""The codec's bytes for any text, and the joined stream against the whole reply."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mindstream.handlers.triton_codec import ReplyOptions, TritonStreamCodec, whole_reply
from mindstream.handlers.wire_json import encode
from mindstream.plugin.request import Chunk, FinishReason
from mindstream.plugin.service import TextChunk

any_text = st.text() | st.text(alphabet='\x85\u2028\u2029"\\\n\r\x00\x7f\ud800\udc00é😀')


def pieces_of(texts: Sequence[str]) -> list[TextChunk]:
    last = len(texts) - 1
    return [
        TextChunk(
            text,
            Chunk(
                token_ids=(7,),
                generated_tokens=number + 1,
                batch_size=3,
                queue_wait_us=number,
                prefill_ms=0.1 + 0.2 if number == 0 else None,
                decode_ms=None if number == 0 else 1e-9,
                finish_reason=FinishReason.LENGTH if number == last else None,
            ),
        )
        for number, text in enumerate(texts)
    ]


def scalar(text: str) -> str:
    """The text with every lone surrogate as U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


@given(text=any_text)
def test_json_text(text: str) -> None:
    data = encode({"a": text})
    assert len(data.decode().splitlines()) == 1
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert json.loads(data) == {"a": joined}


@given(texts=st.lists(st.text(), min_size=1, max_size=6), details=st.booleans())
def test_joined_stream_is_the_whole_reply(texts: list[str], details: bool) -> None:
    options = ReplyOptions("a", "m", details=details)
    codec = TritonStreamCodec(options)
    events = [codec.event(piece) for piece in pieces_of(texts)]
    full = TritonStreamCodec(ReplyOptions("a", "m", details=details, full_text=True))
    full_events = [full.event(piece) for piece in pieces_of(texts)]
    for event in (*events, *full_events):
        assert event.startswith(b'data:{"id":"a","model_name":"m","model_version":null,"text_outp')
        assert event.endswith(b"}\n\n")
        assert event.count(b"\n") == 2
    stream = [json.loads(event[5:]) for event in events]
    whole = json.loads(whole_reply(options, pieces_of(texts)))
    assert "".join(event["text_output"] for event in stream) == whole["text_output"]
    assert json.loads(full_events[-1][5:])["text_output"] == whole["text_output"]
    assert ("details" in whole) is details
    if details:
        shared = ("finish_reason", "generated_tokens", "first_token_cost", "decode_cost")
        for key in shared:
            assert whole["details"][key] == stream[-1]["details"][key]
        for key in ("batch_size", "queue_wait_time"):
            assert whole["details"][key] == [event["details"][key] for event in stream]


def test_keys_stand_in_the_documented_order() -> None:
    codec = TritonStreamCodec(ReplyOptions("a", "m", details=True))
    event = json.loads(codec.event(pieces_of(["x"])[0])[5:])
    assert list(event) == [
        "id",
        "model_name",
        "model_version",
        "text_output",
        "details",
        "prefill_time",
        "decode_time",
    ]
    assert list(event["details"]) == [
        "finish_reason",
        "generated_tokens",
        "first_token_cost",
        "decode_cost",
        "batch_size",
        "queue_wait_time",
    ]


def test_times_are_floats_of_whole_microseconds() -> None:
    codec = TritonStreamCodec(ReplyOptions("a", "m", details=True))
    first, second = (codec.event(piece) for piece in pieces_of(["x", "y"]))
    assert first.endswith(b'"prefill_time":0.3,"decode_time":null}\n\n')
    assert second.endswith(b'"prefill_time":null,"decode_time":0.0}\n\n')


def test_a_stop_call_adds_no_step() -> None:
    pieces = pieces_of(["x", "y"])
    last = pieces[-1].chunk
    stopped = TextChunk("z", Chunk((), 1, 3, 0, None, 0.5, FinishReason.STOP))
    reply = json.loads(whole_reply(ReplyOptions("a", "m", details=True), [pieces[0], stopped]))
    assert last.finish_reason is FinishReason.LENGTH
    assert reply["text_output"] == "xz"
    assert reply["details"]["finish_reason"] == "stop_sequence"
    assert reply["details"]["batch_size"] == [3]
