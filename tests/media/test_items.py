"""The list of a multimodal prompt: what is taken, what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindstream.plugin.errors import InvalidRequest
from mindstream.plugin.media.formats import Kind
from mindstream.plugin.media.items import MediaItem, TextItem, parse_items, text_only
from mindstream.plugin.media.sources import Inline, LocalFile, Url

KEYS = ("image_url", "video_url", "audio_url")


def refusal(items: list[Any]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_items(items)
    return str(caught.value)


def source(key: str, value: object) -> object:
    (item,) = parse_items([{"type": key, key: value}])
    assert isinstance(item, MediaItem)
    assert item.kind is Kind(key)
    return item.source


def test_the_documented_sample() -> None:
    text, image = parse_items(
        [
            {"type": "text", "text": "My name is Olivier and I"},
            {"type": "image_url", "image_url": "/xxxx/test.png"},
        ]
    )
    assert text == TextItem("My name is Olivier and I")
    assert isinstance(image, MediaItem)
    assert isinstance(image.source, LocalFile)
    assert (image.source.path, image.source.format.name, image.index) == (
        "/xxxx/test.png",
        "PNG",
        1,
    )


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "Parameter text_input arr is empty"),
        ([{"type": "text", "text": 1}], "Request param text must be string"),
        ([{"type": "text", "text": None}], "Request param text must be string"),
        ([{"type": "text", "text": "a", "image_url": None}], "Request param image_url null"),
        ([{"type": "image_url", "image_url": None}], "Request param image_url null"),
        ([{"type": "video_url", "video_url": None}], "Request param video_url null"),
        ([{"type": "audio_url", "audio_url": None}], "Request param audio_url null"),
        # Several nulls: image, audio, video.
        ([{"video_url": None, "audio_url": None}], "Request param audio_url null"),
        # The known texts win over what only this server checks earlier in the list.
        ([5, {"type": "image_url", "image_url": None}], "Request param image_url null"),
        (
            [{"type": "image_url", "image_url": "/a/b.png"}] * 21,
            "The number of multimodal url should be no more than 20",
        ),
    ],
)
def test_refusals_in_the_known_words(items: list[Any], message: str) -> None:
    assert refusal(items) == message


@pytest.mark.parametrize(
    ("item", "part"),
    [
        (5, "text_input[0] must be object type."),
        ({}, "text_input[0] needs `type` or exactly one of"),
        ({"text": "a", "image_url": "/a.png"}, "got text, image_url."),
        (
            {"type": "picture"},
            "must be one of text, image_url, video_url, audio_url, got 'picture'.",
        ),
        ({"type": 3}, "got 3."),
        ({"type": "text"}, "text_input[0] is of type text but has no text."),
        ({"type": "text", "text": ""}, "text_input[0].text must not be empty."),
        ({"type": "image_url", "image_url": 3}, "text_input[0].image_url must be string type."),
        (
            {"type": "image_url", "image_url": {}},
            "text_input[0].image_url.url must be string type.",
        ),
        ({"type": "image_url", "image_url": {"url": None}}, "image_url.url must be string type."),
        ({"type": "image_url", "image_url": ""}, "text_input[0].image_url is empty."),
        ({"type": "image_url", "image_url": "/a/b.gif"}, "takes .jpg, .jpeg, .png."),
        ({"type": "image_url", "image_url": "https://h/b.gif?x=.png"}, "ends in '.gif'"),
        ({"type": "video_url", "video_url": "/a/b.png"}, "takes .mp4, .avi, .wmv."),
        ({"type": "audio_url", "audio_url": "/a/b"}, "names a file without an extension"),
        ({"type": "audio_url", "audio_url": "data:audio/wav;base64,AAAA"}, "as an image alone"),
        (
            {"type": "image_url", "image_url": "data:image/gif;base64,AAAA"},
            "data:image/jpeg;base64,",
        ),
        ({"type": "image_url", "image_url": "data:image/png,AAAA"}, "data:image/jpeg;base64,"),
        ({"type": "image_url", "image_url": "test.png"}, "nor an absolute path"),
        ({"type": "image_url", "image_url": "/a\0/b.png"}, "printable"),
        ({"type": "image_url", "image_url": "ftp://h/b.png"}, "only http and https"),
        ({"type": "image_url", "image_url": "file://ftp://h/b.png"}, "only http and https"),
        ({"type": "image_url", "image_url": "http://h/" + "a" * 4096}, "4096 characters, got 4105"),
        ({"type": "image_url", "image_url": "http://h:0/a.png"}, "port outside [1, 65535]: 0"),
        ({"type": "image_url", "image_url": "http://h:65536/a.png"}, "port outside"),
    ],
)
def test_refusals_of_our_own(item: object, part: str) -> None:
    assert part in refusal([item])


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example@evil.example/a.png",
        "http://good.example\\@evil.example/a.png",
        "http://good.example#@evil.example/a.png?",  # a fragment: the host is good.example
        "http://evil.example%2egood.example/a.png",
        "http:///a.png",
        "http:/a.png",
        "http://h /a.png",
        "http://h/a b.png",
        "http://h/a\r\nHost:b/a.png",
        "http://h\u3002example/a.png",
        "http://[::1%25eth0]/a.png",
        "http://h:80:81/a.png",
    ],
)
def test_an_address_with_two_readings_is_refused(url: str) -> None:
    if "#" in url:
        found = source("image_url", url)
        assert isinstance(found, Url)
        assert (found.host, found.target) == ("good.example", "/")
    else:
        assert "form http(s)://host[:port]/path" in refusal(
            [{"type": "image_url", "image_url": url}]
        )


def test_addresses() -> None:
    found = source("image_url", {"url": "HTTPS://Host.Example.:8443/a/B.PNG?sig=%2F#top"})
    assert isinstance(found, Url)
    assert (found.scheme, found.host, found.port) == ("https", "host.example", 8443)
    assert found.target == "/a/B.PNG?sig=%2F"
    assert found.format is not None and found.format.name == "PNG"
    bare = source("video_url", "http://h")
    assert isinstance(bare, Url)
    assert (bare.port, bare.target, bare.format) == (80, "/", None)
    literal = source("audio_url", "http://[2001:DB8::1]/a.mp3")
    assert isinstance(literal, Url)
    assert literal.host == "2001:db8::1"


def test_inline_pictures() -> None:
    named = source("image_url", "data:image/JPEG;base64,/9j/AAAA")
    assert isinstance(named, Inline)
    assert named.base64 == "/9j/AAAA"
    assert named.format is not None and named.format.name == "JPEG"
    # Bare base64 of a JPEG looks like an absolute path; a path has a dot.
    bare = source("image_url", "/9j/4AAQSkZJRg==")
    assert isinstance(bare, Inline)
    assert bare.format is None


def test_inline_size_is_known_without_decoding() -> None:
    limit = 40 * 1024 * 1024
    assert isinstance(source("image_url", "A" * (limit // 3 * 4)), Inline)
    message = refusal([{"type": "image_url", "image_url": "A" * (limit // 3 * 4 + 12)}])
    assert f"at most {limit} bytes" in message


def test_local_files() -> None:
    for path in ("/data/a.MP3", "file:///data/a.MP3"):
        found = source("audio_url", path)
        assert isinstance(found, LocalFile)
        assert found.path == "/data/a.MP3"


def test_type_may_be_left_out() -> None:
    assert parse_items([{"text": "a"}]) == (TextItem("a"),)
    (item,) = parse_items([{"video_url": {"url": "/a/b.avi"}, "unknown": 1}])
    assert isinstance(item, MediaItem)
    assert item.kind is Kind.VIDEO


def test_twenty_media_and_any_number_of_texts() -> None:
    many = [{"type": "image_url", "image_url": "/a/b.png"}] * 20 + [
        {"type": "text", "text": "x"}
    ] * 99
    assert len(parse_items(many)) == 119


def test_text_only() -> None:
    texts = parse_items([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])
    assert text_only(texts, "m") == "a b"
    mixed = parse_items([{"type": "text", "text": "a"}, {"audio_url": "/a/b.mp3"}])
    with pytest.raises(
        InvalidRequest, match=r"model m takes text only, but text_input\[1\].*audio_url"
    ):
        text_only(mixed, "m")


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
address = st.text(max_size=30) | st.builds(
    "{}{}{}".format,
    st.sampled_from(
        ["http://", "https://", "file://", "data:", "data:image/jpeg;base64,", "/", ""]
    ),
    st.text(alphabet="ab./:@[]#?%\\-1é \n", max_size=20),
    st.sampled_from([".png", ".JPG", ".mp4", ".mp3", ".", ""]),
)
item_like = st.dictionaries(
    st.sampled_from(["type", "text", "url", *KEYS]),
    st.sampled_from(["text", *KEYS])
    | address
    | st.builds(lambda v: {"url": v}, address)
    | json_values,
)


@given(st.lists(item_like | json_values, max_size=25))
def test_any_list_parses_or_is_refused_in_a_sentence(items: list[Any]) -> None:
    try:
        parsed = parse_items(items)
    except InvalidRequest as error:
        assert len(str(error)) < 400
    else:
        assert len(parsed) == len(items) > 0


@given(address)
def test_a_taken_address_is_read_as_aiohttp_reads_it(text: str) -> None:
    from yarl import URL

    try:
        (item,) = parse_items([{"image_url": text}])
    except InvalidRequest:
        return
    assert isinstance(item, MediaItem)
    if isinstance(item.source, Url):
        other = URL(json.loads(json.dumps(text)), encoded=True)
        assert (other.host or "").rstrip(".").lower() == item.source.host
        assert other.port == item.source.port
