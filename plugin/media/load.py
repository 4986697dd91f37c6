"""Takes parsed items to decoded media: the one entry for whoever has a model that looks at them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from mindstream.plugin.errors import InvalidRequest
from mindstream.plugin.media.decode import Content, decode, require_decoders
from mindstream.plugin.media.fetch import WORKERS, FetchRules, allowed_domains, fetch
from mindstream.plugin.media.formats import MAX_BYTES, MAX_TOTAL_BYTES, Kind, MediaError
from mindstream.plugin.media.items import Item, MediaItem, TextItem
from mindstream.plugin.media.local import open_local
from mindstream.plugin.media.sources import Inline, LocalFile, Url
from mindstream.plugin.model_config import MediaConfig

# The replaced server's text; clients look for its beginning.
_FAILED = "[InferTokenizer::DownloadUrl] Download fail: ValueError: "


@dataclass(frozen=True, slots=True)
class Media:
    """One item that decodes. `file` is open at its start, `size` bytes long."""

    kind: Kind
    content: Content
    size: int
    file: BinaryIO


def rules_of(config: MediaConfig) -> FetchRules:
    """What this deployment and this process' environment allow."""
    return FetchRules(
        allowed_domains=allowed_domains(os.environ),
        connect_timeout=config.connect_timeout,
        read_timeout=config.read_timeout,
    )


@asynccontextmanager
async def load(
    items: Sequence[Item], config: MediaConfig, rules: FetchRules | None = None
) -> AsyncIterator[tuple[TextItem | Media, ...]]:
    """Fetches, checks and decodes one item after the other; leaving the block closes the files.

    Runs on the event loop and does not block it. Web media lie in unnamed files of the temporary
    folder (TMPDIR): up to MAX_TOTAL_BYTES a request. Cancelling ends a fetch at once. `rules`
    default to `rules_of(config)`. Raises InvalidRequest, and RequestRefused without the packages
    of the extra `media`.
    """
    if any(isinstance(item, MediaItem) for item in items):
        require_decoders()
    with ExitStack() as files:
        loaded: list[TextItem | Media] = []
        left = MAX_TOTAL_BYTES
        for item in items:
            if isinstance(item, TextItem):
                loaded.append(item)
                continue
            try:
                media = await _load_one(item, config, rules or rules_of(config), left, files)
            except MediaError as error:
                where = f"text_input[{item.index}].{item.kind.value}"
                raise InvalidRequest(f"{_FAILED}{where} {error}.") from None
            left -= media.size
            loaded.append(media)
        yield tuple(loaded)


async def _load_one(
    item: MediaItem, config: MediaConfig, rules: FetchRules, left: int, files: ExitStack
) -> Media:
    loop = asyncio.get_running_loop()
    limit = min(left, MAX_BYTES[item.kind])
    source = item.source
    if isinstance(source, Url):
        file = files.enter_context(await fetch(source, rules, limit))
    elif isinstance(source, LocalFile):
        opening = loop.run_in_executor(WORKERS, open_local, source.path, config.local_dir, limit)
        file = files.enter_context(await opening)
    else:
        file = io.BytesIO(await loop.run_in_executor(WORKERS, _decode_base64, source, limit))
    size = await loop.run_in_executor(WORKERS, file.seek, 0, os.SEEK_END)
    content = await loop.run_in_executor(WORKERS, decode, item.kind, source.format, file)
    return Media(item.kind, content, size, file)


def _decode_base64(source: Inline, limit: int) -> bytes:
    try:
        data = base64.b64decode(source.base64, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError(
            "is neither an http(s) address, nor a file name with its extension, nor valid base64"
        ) from None
    if len(data) > limit:
        raise MediaError(f"may have at most {limit} bytes, got {len(data)}")
    return data
