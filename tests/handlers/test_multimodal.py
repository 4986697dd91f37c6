"""`text_input` as a list over the wire; what an item itself may be is tried in tests/media."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindstream.handlers import triton
from mindstream.handlers.testing import Server
from mindstream.handlers.triton_item_fields import ITEM_FIELDS
from mindstream.plugin.errors import InvalidRequest
from mindstream.plugin.media.formats import MAX_BYTES, Kind
from mindstream.plugin.media.items import MediaItem, TextItem, parse_items
from mindstream.plugin.model_config import MediaConfig

TEXT = {"type": "text", "text": "What is this? "}


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG")
    return buffer.getvalue()


def jpeg_item() -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "JPEG")
    return {"type": "image_url", "image_url": base64.b64encode(buffer.getvalue()).decode()}


@pytest.fixture
def server(start_server: Callable[..., Server], tmp_path: Path) -> Server:
    (tmp_path / "good.png").write_bytes(png())
    (tmp_path / "bad.png").write_bytes(b"no picture")
    return start_server(media=MediaConfig(local_dir=str(tmp_path)))


def refused(server: Server, *items: Any) -> str:
    reply = server.stream({"text_input": list(items)})
    assert (reply.status, reply.json()["error_type"]) == (422, "Input Validation Error")
    return str(reply.json()["error"])


def test_a_good_picture_is_refused_by_a_text_model(server: Server, tmp_path: Path) -> None:
    told = "The model echo takes text only, but text_input[1] is of type image_url."
    path = str(tmp_path / "good.png")
    for address in (path, {"url": path}, {"url": f"file://{path}"}):
        assert refused(server, TEXT, {"type": "image_url", "image_url": address}) == told
    assert refused(server, TEXT, jpeg_item()) == told


def test_a_file_that_only_claims_to_be_a_picture(server: Server, tmp_path: Path) -> None:
    item = {"type": "image_url", "image_url": str(tmp_path / "bad.png")}
    assert refused(server, TEXT, item).startswith(
        "[InferTokenizer::DownloadUrl] Download fail: ValueError: text_input[1].image_url "
    )


def test_a_file_outside_the_folder(server: Server) -> None:
    item = {"type": "image_url", "image_url": "/etc/passwd.png"}
    assert "text_input[0].image_url" in refused(server, item)


# Written by hand from the documentation: what each row of the item table takes and refuses.
ITEM_ROWS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "type": ("text", ["text", None], ["", "audio", 5, []]),
    "text": ("text", ["x", " 中文 "], ["", None, 5, ["x"]]),
    "image_url": (
        "image_url",
        ["/d/a.jpg", "/d/a.jpeg", "/d/a.PNG", "http://h/a.png", "https://h/a", {"url": "/d/a.png"}],
        [None, 5, "", [], {}, {"url": None}, "/d/a.gif", "/d/a.mp4", "ftp://h/a.png"],
    ),
    "video_url": (
        "video_url",
        ["/d/a.mp4", "/d/a.AVI", "/d/a.wmv", "http://h/a.mp4"],
        [None, 5, "", "/d/a.mkv", "/d/a.png", "data:video/mp4;base64,AAAA"],
    ),
    "audio_url": (
        "audio_url",
        ["/d/a.mp3", "/d/a.wav", "/d/a.flac", "https://h/a.flac"],
        [None, 5, "", "/d/a.ogg", "/d/a.mp4", "data:audio/wav;base64,AAAA"],
    ),
}


def test_every_row_of_the_item_table_has_its_values() -> None:
    assert [row.name for row in ITEM_FIELDS] == list(ITEM_ROWS)
    documented = {"image_url": 40, "video_url": 512, "audio_url": 40}
    assert {kind.value: MAX_BYTES[kind] // 2**20 for kind in Kind} == documented


@pytest.mark.parametrize("name", ITEM_ROWS)
def test_an_item_field_inside_and_outside(name: str) -> None:
    kind, inside, outside = ITEM_ROWS[name]
    whole = {"type": kind, kind: "x"}
    for value in inside:
        (item,) = parse_items([{**whole, name: value}])
        assert isinstance(item, TextItem if kind == "text" else MediaItem)
    for value in outside:
        with pytest.raises(InvalidRequest) as told:
            parse_items([{**whole, name: value}])
        assert name in str(told.value)


def test_too_many_items(server: Server) -> None:
    assert refused(server, *[jpeg_item()] * 21) == (
        "The number of multimodal url should be no more than 20"
    )


def test_the_texts_together_keep_the_limit_of_one(server: Server) -> None:
    half = {"type": "text", "text": "x" * (2 * 2**20 + 1)}
    assert "(0, 4194304], but the length of inputs is 4194306" in refused(server, half, half)


def test_without_the_packages_a_text_model_still_takes_text_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = jpeg_item()
    monkeypatch.setitem(sys.modules, "PIL", None)
    told = "The model echo takes text only, but text_input[0] is of type image_url."
    assert refused(server, item) == told


def test_media_that_take_too_long_end_with_the_request(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(triton, "_look_at", never)
    serving = replace(server.service.deployment.serving, e2e_timeout=0.05)
    deployment = replace(server.service.deployment, serving=serving)
    monkeypatch.setattr(server.service, "deployment", deployment)
    reply = server.stream({"text_input": [jpeg_item()]})
    assert (reply.status, reply.json()["error"]) == (
        500,
        "Engine callback timeout: server e2eTimeout",
    )
