"""The kinds of media, the formats of each, and how a format is told by name and by content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

MIB = 1024 * 1024


class Kind(str, Enum):
    """What an item holds; the value is its key on the wire."""

    IMAGE = "image_url"
    VIDEO = "video_url"
    AUDIO = "audio_url"


# Bytes of one item. The documentation's 40, 512 and 40 MB.
MAX_BYTES = {Kind.IMAGE: 40 * MIB, Kind.VIDEO: 512 * MIB, Kind.AUDIO: 40 * MIB}
# Bytes of all items of one request.
MAX_TOTAL_BYTES = 1000 * MIB
# Enough of a file's beginning for every `matches` below.
HEAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Format:
    """One file format.

    `decoder` is the only decoder the file is given to: Pillow's name of a picture format, FFmpeg's
    of a demuxer. Probing for others would let a file choose among hundreds, playlists included.
    """

    name: str
    kind: Kind
    extensions: tuple[str, ...]
    decoder: str
    matches: Callable[[bytes], bool]


def _riff(kind: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[:4] == b"RIFF" and head[8:12] == kind


def _mp3(head: bytes) -> bool:
    # An ID3 tag, or a frame header: eleven set bits, then a layer that is not "reserved".
    frame = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and bool(head[1] & 0x06)
    return head[:3] == b"ID3" or frame


_ASF = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")

FORMATS = (
    Format("JPEG", Kind.IMAGE, ("jpg", "jpeg"), "JPEG", lambda head: head[:3] == b"\xff\xd8\xff"),
    Format("PNG", Kind.IMAGE, ("png",), "PNG", lambda head: head[:8] == b"\x89PNG\r\n\x1a\n"),
    Format("MP4", Kind.VIDEO, ("mp4",), "mp4", lambda head: head[4:8] == b"ftyp"),
    Format("AVI", Kind.VIDEO, ("avi",), "avi", _riff(b"AVI ")),
    Format("WMV", Kind.VIDEO, ("wmv",), "asf", lambda head: head == _ASF),
    Format("MP3", Kind.AUDIO, ("mp3",), "mp3", _mp3),
    Format("WAV", Kind.AUDIO, ("wav",), "wav", _riff(b"WAVE")),
    Format("FLAC", Kind.AUDIO, ("flac",), "flac", lambda head: head[:4] == b"fLaC"),
)


def extensions(kind: Kind) -> tuple[str, ...]:
    """The file name endings of a kind, without the dot."""
    return tuple(e for f in FORMATS if f.kind is kind for e in f.extensions)


def by_extension(kind: Kind, extension: str) -> Format | None:
    """`extension` without its dot, in any case."""
    wanted = extension.lower()
    return next((f for f in FORMATS if f.kind is kind and wanted in f.extensions), None)


def by_content(kind: Kind, head: bytes) -> Format | None:
    """`head`: the first HEAD_BYTES of the file, or all of a shorter one."""
    return next((f for f in FORMATS if f.kind is kind and f.matches(head)), None)


class MediaError(ValueError):
    """One item cannot be taken; the message is a sentence without the item's place in the list."""
