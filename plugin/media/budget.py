"""Bounds the work that content may ask of a decoder: a small file can be made to cost hours.

Blocking, for worker threads: a thread cannot be ended from outside, so its work must end by itself.
"""

from __future__ import annotations

import os
import time
from typing import BinaryIO

from mindstream.plugin.media.formats import MediaError

# Seconds of this thread's processor. A real picture of the largest size takes two.
MAX_CPU_SECONDS = 10.0
# A real file of the largest size takes 20,000; millions of tiny parts take millions.
MAX_READS = 100_000
# Times the pixels of a picture. Each scan of a JPEG goes over all of them again; real ones have
# ten, 40 MB have room for a million.
MAX_SCANNED_PIXELS = 16 * 89_478_485

_SCAN_MARKER = b"\xff\xda"
_BLOCK = 1024 * 1024


class MeteredFile:
    """A decoder's view of an open file: raises MediaError once when the budget is spent, then ends.

    Once, since PyAV prints what is raised while it still holds an earlier exception.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._reads = 0
        self._spent = False
        self._began = time.thread_time()

    def read(self, size: int = -1) -> bytes:
        if self._spent:
            return b""
        self._reads += 1
        if self._reads > MAX_READS or time.thread_time() - self._began > MAX_CPU_SECONDS:
            self._spent = True
            raise MediaError("takes more work to decode than its size allows")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def check_scans(file: BinaryIO, pixels: int) -> None:
    """Raises MediaError for a JPEG of too many scans; leaves `file` at its start.

    Counts the marker wherever it stands: compressed data cannot hold it, a thumbnail adds one.
    """
    file.seek(0)
    scans, last = 0, b""
    while block := file.read(_BLOCK):
        scans += (last + block).count(_SCAN_MARKER)
        last = block[-1:]
    file.seek(0)
    if scans * pixels > MAX_SCANNED_PIXELS:
        most = MAX_SCANNED_PIXELS // pixels
        raise MediaError(f"may have at most {most} scans for its {pixels} pixels, got {scans}")
