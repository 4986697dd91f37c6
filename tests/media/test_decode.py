"""Content decides: what does not decode as what it is called is refused."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mindstream.plugin.media import budget
from mindstream.plugin.media.decode import MAX_PIXELS, decode
from mindstream.plugin.media.formats import FORMATS, Kind, MediaError, by_extension

Samples = dict[str, tuple[Kind, bytes]]


def png(width: int, height: int, rows: bytes) -> bytes:
    """A PNG of 1-bit grey pixels, by hand: its header may lie."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    "extension", ["jpg", "jpeg", "png", "mp4", "avi", "wmv", "mp3", "wav", "flac"]
)
def test_every_format_decodes(samples: Samples, extension: str) -> None:
    kind, data = samples[extension]
    content = decode(kind, by_extension(kind, extension), io.BytesIO(data))
    assert extension in content.format.extensions
    if kind is Kind.IMAGE:
        assert (content.width, content.height) == (8, 6)
    elif kind is Kind.VIDEO:
        assert (content.width, content.height, content.seconds) == (64, 48, 0.5)
    else:
        assert (content.sample_rate, content.seconds) == (16000, 0.288)


def test_a_file_that_only_claims_to_be_a_png(samples: Samples) -> None:
    claims = by_extension(Kind.IMAGE, "png")
    for data, part in [
        (b"", "none of jpg, jpeg, png"),
        (b"<svg onload=alert(1)>", "none of jpg, jpeg, png"),
        (samples["jpg"][1], "named as PNG but its content is JPEG"),
        (b"\x89PNG\r\n\x1a\n" + b"not a picture" * 9, "cannot be decoded as PNG"),
        (samples["png"][1][:50], "cannot be decoded as PNG"),
    ]:
        with pytest.raises(MediaError, match=part):
            decode(Kind.IMAGE, claims, io.BytesIO(data))


def test_content_of_another_kind_is_refused(samples: Samples) -> None:
    for kind, data in samples.values():
        for other in set(Kind) - {kind}:
            with pytest.raises(MediaError, match="its content is none of"):
                decode(other, None, io.BytesIO(data))


@pytest.mark.parametrize("side", [9_460, 13_400, 60_000])
def test_a_small_file_with_a_huge_picture(side: int) -> None:
    data = png(side, side, b"\0" * 1000)
    assert len(data) < 200
    with pytest.raises(MediaError, match=f"{MAX_PIXELS} pixels"):
        decode(Kind.IMAGE, None, io.BytesIO(data))


def segments(jpeg: bytes) -> tuple[bytes, bytes]:
    """A progressive JPEG without its end, and its last scan."""
    whole = jpeg.removesuffix(b"\xff\xd9")
    return whole, whole[whole.rfind(b"\xff\xda") :]


def test_a_jpeg_of_very_many_scans_is_refused_without_decoding_them() -> None:
    buffer = io.BytesIO()
    Image.new("L", (2000, 2000)).save(buffer, "JPEG", progressive=True)
    whole, scan = segments(buffer.getvalue())
    assert whole.count(b"\xff\xda") > 1
    good = decode(Kind.IMAGE, None, io.BytesIO(whole + scan * 100 + b"\xff\xd9"))
    assert good.width == 2000
    # Each scan is a few bytes and costs a pass over all pixels; decoding these would take hours.
    with pytest.raises(MediaError, match=r"at most 357 scans for its 4000000 pixels, got 1000\d\d"):
        decode(Kind.IMAGE, None, io.BytesIO(whole + scan * 100_000 + b"\xff\xd9"))


@pytest.mark.parametrize("name", ["jpg", "png", "mp4"])
def test_millions_of_tiny_parts_are_not_read(
    samples: Samples,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(budget, "MAX_CPU_SECONDS", 0.5)
    kind, data = samples[name]
    start, part = {
        "jpg": (data[:2], b"\xff\xe0\0\x02"),
        "png": (data[:33], b"\0\0\0\0tESt" + struct.pack(">I", zlib.crc32(b"tESt"))),
        "mp4": (b"\0\0\0\x10ftypmp42\0\0\0\0", b"\0\0\0\x08free"),
    }[name]
    with pytest.raises(MediaError, match="more work to decode"):
        decode(kind, None, io.BytesIO(start + part * 4_000_000 + data[len(start) :]))
    assert capfd.readouterr().err == ""


def test_a_playlist_opens_nothing(samples: Samples) -> None:
    # FFmpeg would follow what a playlist names; none of the demuxers that may run reads one.
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    for head in (b"", b"ID3", b"\0\0\0\x08ftyp", samples["wmv"][1][:16]):
        for kind in (Kind.VIDEO, Kind.AUDIO):
            with pytest.raises(MediaError):
                decode(kind, None, io.BytesIO(head + playlist))


def test_sound_without_sound(samples: Samples) -> None:
    with pytest.raises(MediaError, match=r"cannot be decoded as WAV|without sound"):
        decode(Kind.AUDIO, None, io.BytesIO(samples["wav"][1][:12]))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([f.extensions[0] for f in FORMATS]),
    cut=st.integers(0, 10_000),
    damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8),
)
def test_damaged_files_decode_or_are_refused(
    samples: Samples, name: str, cut: int, damage: list[tuple[int, int]]
) -> None:
    kind, whole = samples[name]
    data = bytearray(whole[: max(1, len(whole) - cut % len(whole))])
    for place, value in damage:
        data[place % len(data)] = value
    try:
        decode(kind, None, io.BytesIO(bytes(data)))
    except MediaError as error:
        assert len(str(error)) < 200
