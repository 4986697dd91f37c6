"""What the string of a media item means: a web address, a local file, or the data itself. Pure.

A web address is taken only if it has one reading: the host that the allow-list sees is, byte for
byte, the host that the connection is made to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mindstream.plugin.media.formats import (
    MAX_BYTES,
    Format,
    Kind,
    MediaError,
    by_extension,
    extensions,
)

MAX_ADDRESS_CHARS = 4096

# No user, no backslash, no white space, no percent sign in the authority; nothing but printable
# ASCII behind it. Two URL parsers cannot disagree about what is left.
_URL = re.compile(
    r"(?P<scheme>(?i:https?))://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[!-\"$->@-~]*)?(?P<query>\?[!-\"$-~]*)?(?:#[!-~]*)?"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_DATA = re.compile(r"data:(?P<type>[a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)
_DATA_TYPES = {"image/jpeg": "jpeg", "image/jpg": "jpeg", "image/png": "png"}


@dataclass(frozen=True, slots=True)
class Url:
    """A checked http or https address; `host` is lower case, without brackets and final dot."""

    scheme: str
    host: str
    port: int
    target: str  # path and query, percent-encoded as the client sent it
    format: Format | None  # by the path's extension; None: it has none


@dataclass(frozen=True, slots=True)
class LocalFile:
    """An absolute path, not yet looked at."""

    path: str
    format: Format


@dataclass(frozen=True, slots=True)
class Inline:
    """Base64 text, not yet decoded; its length is checked."""

    base64: str
    format: Format | None  # by the data URL's type; None: bare base64


Source = Url | LocalFile | Inline


def parse_source(kind: Kind, text: str) -> Source:
    """Raises MediaError."""
    if not text:
        raise MediaError("is empty")
    if text[:5].lower() == "data:":
        return _data_url(kind, text)
    if kind is Kind.IMAGE and not _SCHEME.match(text) and "." not in text:
        return Inline(_sized(kind, text, 0), None)
    if len(text) > MAX_ADDRESS_CHARS:
        raise MediaError(f"may have at most {MAX_ADDRESS_CHARS} characters, got {len(text)}")
    if text[:5].lower() in ("http:", "https"):
        return _url(kind, text)
    return _local(kind, text)


def _sized(kind: Kind, text: str, start: int) -> str:
    # An upper bound of the decoded size, known without decoding.
    size = (len(text) - start) // 4 * 3 - 2
    if size > MAX_BYTES[kind]:
        raise MediaError(f"may have at most {MAX_BYTES[kind]} bytes, got at least {size}")
    return text[start:]


def _data_url(kind: Kind, text: str) -> Inline:
    match = _DATA.match(text[:100])
    name = _DATA_TYPES.get(match["type"].lower()) if match else None
    if kind is not Kind.IMAGE or match is None or name is None:
        raise MediaError(
            "takes base64 data as an image alone, beginning with data:image/jpeg;base64, "
            "or data:image/png;base64,"
        )
    return Inline(_sized(kind, text, match.end()), by_extension(kind, name))


def _url(kind: Kind, text: str) -> Url:
    match = _URL.fullmatch(text)
    if match is None:
        raise MediaError(
            "is not an address of the form http(s)://host[:port]/path in printable ASCII "
            "without user name and spaces"
        )
    scheme = match["scheme"].lower()
    port = int(match["port"] or (443 if scheme == "https" else 80))
    if not 0 < port < 65536:
        raise MediaError(f"has a port outside [1, 65535]: {port}")
    path = match["path"] or "/"
    return Url(
        scheme=scheme,
        host=match["host"].strip("[]").rstrip(".").lower(),
        port=port,
        target=path + (match["query"] or ""),
        format=_format(kind, path),
    )


def _local(kind: Kind, text: str) -> LocalFile:
    path = text[len("file://") :] if text[:7].lower() == "file://" else text
    if _SCHEME.match(path) and "://" in path:
        raise MediaError(
            f"has the scheme {path.split(':')[0][:20]!r}; only http and https are fetched"
        )
    if not path.startswith("/") or not path.isprintable():
        raise MediaError(
            "is neither an http(s) address nor an absolute path of printable characters"
        )
    found = _format(kind, path)
    if found is None:
        raise MediaError(f"names a file without an extension; {_expected(kind)}")
    return LocalFile(path, found)


def _format(kind: Kind, path: str) -> Format | None:
    name = path.rsplit("/", 1)[-1]
    stem, dot, extension = name.rpartition(".")
    if not dot or not stem:
        return None
    found = by_extension(kind, extension)
    if found is None:
        raise MediaError(f"ends in {'.' + extension[:20]!r}; {_expected(kind)}")
    return found


def _expected(kind: Kind) -> str:
    return f"{kind.value} takes " + ", ".join("." + e for e in extensions(kind))
