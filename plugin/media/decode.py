"""Looks at the content: what is called a PNG must be one that decodes. Blocking.

Runs on a worker thread. A picture is decoded to its last pixel, of a film and a sound the first
frame. Every decoder is told its format beforehand, has a bound on the pixels it may make and on the
work it may take, and reads from an open file: none may open anything else.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

from mindstream.plugin.errors import RequestRefused
from mindstream.plugin.media.budget import MeteredFile, check_scans
from mindstream.plugin.media.formats import (
    HEAD_BYTES,
    Format,
    Kind,
    MediaError,
    by_content,
    extensions,
)

if TYPE_CHECKING:
    from av import AudioStream, VideoStream
    from av.container import InputContainer

# Pixels of one picture or frame; as RGB about 256 MiB. A small file can claim to hold far more.
MAX_PIXELS = 89_478_485
# A film whose first frame is not complete after this many packets is not decodable in reason.
_MAX_PACKETS = 512

# What the decoders raise over content that is not what they expect.
_DECODER_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    struct.error,
    zlib.error,
    ArithmeticError,
    RuntimeError,
    NotImplementedError,
)


@dataclass(frozen=True, slots=True)
class Content:
    """What the decoder found."""

    format: Format
    width: int = 0  # pixels; 0 for sound
    height: int = 0
    seconds: float | None = None  # of a film or sound, if its header says so
    sample_rate: int = 0  # Hz; 0 without sound


def require_decoders() -> None:
    """Raises RequestRefused if the optional packages are not installed."""
    try:
        import aiohttp  # noqa: F401 - only whether it is there
        import av  # noqa: F401 - as above
        import PIL  # noqa: F401 - as above
    except ImportError as error:
        raise RequestRefused(
            f"Media cannot be read: {error.name} is not installed on this server "
            "(pip install 'mindstream[media]')."
        ) from None


def decode(kind: Kind, declared: Format | None, file: BinaryIO) -> Content:
    """Checks name against content and decodes; leaves `file` at its start. Raises MediaError."""
    file.seek(0)
    found = by_content(kind, file.read(HEAD_BYTES))
    file.seek(0)
    if found is None:
        raise MediaError(
            f"is not what it is given as: its content is none of {', '.join(extensions(kind))}"
        )
    if declared is not None and declared is not found:
        raise MediaError(f"is named as {declared.name} but its content is {found.name}")
    try:
        content = _picture(found, file) if kind is Kind.IMAGE else _stream(found, file)
    except MediaError:
        raise
    except MemoryError:
        raise MediaError(f"needs more memory to decode as {found.name} than there is") from None
    except _DECODER_ERRORS as error:
        raise MediaError(f"cannot be decoded as {found.name} ({type(error).__name__})") from None
    file.seek(0)
    return content


def _picture(found: Format, file: BinaryIO) -> Content:
    from PIL import Image

    try:
        # Pillow needs no more of a file than read, seek and tell.
        metered = cast(BinaryIO, MeteredFile(file))
        with Image.open(metered, formats=[found.decoder]) as picture:
            _check_pixels(*picture.size)
            if found.name == "JPEG":
                place = file.tell()
                check_scans(file, picture.width * picture.height)
                file.seek(place)
            picture.load()
            return Content(found, *picture.size)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise MediaError(f"has more than {MAX_PIXELS} pixels") from None


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise MediaError(f"may have at most {MAX_PIXELS} pixels, got {width} x {height}")


def _stream(found: Format, file: BinaryIO) -> Content:
    import av

    metered, options = MeteredFile(file), {"protocol_whitelist": "none"}
    with av.open(metered, "r", found.decoder, options=options) as container:
        seconds = container.duration / av.time_base if container.duration else None
        # A sound file may carry a cover picture, a film several tracks: the first that fits counts.
        if found.kind is Kind.AUDIO:
            if not container.streams.audio:
                raise MediaError(f"is a {found.name} file without sound")
            sound = container.streams.audio[0]
            _first_frame(container, sound, found)
            return Content(found, seconds=seconds, sample_rate=sound.codec_context.sample_rate)
        if not container.streams.video:
            raise MediaError(f"is a {found.name} file without a film")
        film = container.streams.video[0]
        _check_pixels(film.codec_context.width, film.codec_context.height)
        # A frame may be larger than the header says: FFmpeg's own bound holds for each.
        film.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
        _first_frame(container, film, found)
        return Content(found, film.codec_context.width, film.codec_context.height, seconds)


def _first_frame(
    container: InputContainer, stream: VideoStream | AudioStream, found: Format
) -> None:
    stream.codec_context.thread_count = 1
    for count, packet in enumerate(container.demux(stream)):
        if packet.decode():
            return
        if count > _MAX_PACKETS:
            break
    raise MediaError(f"is a {found.name} file in which no frame decodes")
