"""Where the cache folder is."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindstream.plugin.paths import cache_dir, models_dir


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        ("", "/xdg", "/xdg/mindstream"),
        ("", "relative", "/home/me/.cache/mindstream"),
        ("", "", "/home/me/.cache/mindstream"),
        ("~/c", "", "/home/me/c"),
    ],
)
def test_order(monkeypatch: pytest.MonkeyPatch, own: str, xdg: str, expected: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("MINDSTREAM_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache_dir() == Path(expected)
    assert models_dir() == Path(expected) / "models"
