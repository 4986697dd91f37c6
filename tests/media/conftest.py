"""Samples of every format, made by the encoders of the same libraries."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from PIL import Image

from mindstream.plugin.media.formats import Kind


def picture(name: str, width: int = 8, height: int = 6) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(buffer, name)
    return buffer.getvalue()


def film(muxer: str, encoder: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=muxer) as container:
        stream = container.add_stream(encoder, rate=10)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in range(5):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), shade * 40, np.uint8))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def sound(muxer: str, encoder: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=muxer) as container:
        stream = container.add_stream(encoder, rate=16000, layout="mono")
        assert isinstance(stream, av.AudioStream)
        samples = np.zeros((1, 4608), np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        resampler = av.AudioResampler(stream.codec_context.format, "mono", 16000)
        for part in resampler.resample(frame):
            container.mux(stream.encode(part))
        container.mux(stream.encode())
    return buffer.getvalue()


@pytest.fixture(scope="session")
def samples() -> dict[str, tuple[Kind, bytes]]:
    """One valid file of each format, by extension."""
    return {
        "jpg": (Kind.IMAGE, picture("JPEG")),
        "jpeg": (Kind.IMAGE, picture("JPEG")),
        "png": (Kind.IMAGE, picture("PNG")),
        "mp4": (Kind.VIDEO, film("mp4", "mpeg4")),
        "avi": (Kind.VIDEO, film("avi", "mpeg4")),
        "wmv": (Kind.VIDEO, film("asf", "wmv2")),
        "mp3": (Kind.AUDIO, sound("mp3", "mp3")),
        "wav": (Kind.AUDIO, sound("wav", "pcm_s16le")),
        "flac": (Kind.AUDIO, sound("flac", "flac")),
    }
