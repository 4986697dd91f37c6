"""Opens a media file below the one folder that a deployment names. Blocks: for worker threads."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from mindstream.plugin.media.formats import MediaError

# O_NONBLOCK: opening a FIFO must not wait for a writer; it is refused right after.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


def open_local(path: str, local_dir: str, max_bytes: int) -> BinaryIO:
    """The open regular file; raises MediaError.

    Links are resolved first. The result holds no link, so it is then walked down from the folder
    without following any: one that is put there meanwhile ends the walk. What lies outside the
    folder is refused with one text, whether or not it exists.
    """
    root = Path(os.path.realpath(local_dir))
    resolved = Path(os.path.realpath(path))
    if root not in resolved.parents:
        raise MediaError(f"is not a file below {local_dir}")
    try:
        fd = _walk(root, resolved.relative_to(root).parts)
    except OSError as error:
        raise MediaError(f"cannot be opened below {local_dir}: {error.strerror}") from None
    try:
        _check(os.fstat(fd), max_bytes)
    except MediaError:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _walk(root: Path, parts: tuple[str, ...]) -> int:
    folder = os.open(root, _FOLDER)
    try:
        for name in parts[:-1]:
            below = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(parts[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)


def _check(status: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise MediaError("is not a regular file")
    if status.st_size > max_bytes:
        raise MediaError(f"may have at most {max_bytes} bytes, got {status.st_size}")
