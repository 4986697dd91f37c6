"""The table of a `text_input` list, for docs/protocol.md. Extensions and sizes are the code's."""

from __future__ import annotations

from mindstream.handlers.triton_reply_fields import ReplyField
from mindstream.plugin.media.formats import MAX_BYTES, MIB, Kind, extensions
from mindstream.plugin.media.sources import MAX_ADDRESS_CHARS

_DOCUMENTED = {
    Kind.IMAGE: "local path or URL of jpg, png, jpeg, or a jpg in base64; at most 40 MB",
    Kind.VIDEO: "local path or URL of MP4, AVI, WMV; at most 512 MB",
    Kind.AUDIO: "local path or URL of MP3, WAV, FLAC; at most 40 MB",
}
_REAL_SERVER = {
    Kind.IMAGE: "same, to maxRequestLength MB; the name alone tells the format",
    Kind.VIDEO: "same, to 512 MB; the name alone tells the format",
    Kind.AUDIO: "same, to maxRequestLength MB; the name alone tells the format",
}


def _media(kind: Kind) -> ReplyField:
    inline = ", base64 of JPEG or PNG, bare or as a data URL" if kind is Kind.IMAGE else ""
    return ReplyField(
        kind.value,
        "string or object",
        f'Or `{{"url": string}}`. Local path or http(s) URL of {", ".join(extensions(kind))}'
        f"{inline}; at most {MAX_BYTES[kind] // MIB} MiB, the address {MAX_ADDRESS_CHARS} "
        "characters. The content must decode as what its name says.",
        _DOCUMENTED[kind],
        _REAL_SERVER[kind],
    )


ITEM_FIELDS = (
    ReplyField(
        "type",
        "string",
        "`text` or one of the three below. If absent, the only one of the four keys that is there.",
        "optional; text, image_url, video_url, audio_url",
        "same",
    ),
    ReplyField("text", "string", "Not empty.", "not empty", "any string"),
    *(_media(kind) for kind in Kind),
)
