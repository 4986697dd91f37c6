"""Backends by name; a foreign distribution is made by writing its metadata."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mindstream.plugin.errors import ConfigError
from mindstream.plugin.registry import backend_names, load_backend

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install("name", "module:attr", source): a distribution with one backend."""

    def make(name: str, value: str, source: str = "", dist: str = "foreign") -> None:
        info = tmp_path / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[mindstream.backends]\n{name} = {value}\n")
        (tmp_path / f"{value.partition(':')[0]}.py").write_text(source)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    sys.modules.pop("foreign_backend", None)


def test_the_built_in_ones_are_registered() -> None:
    assert {"echo", "mindspore"} <= set(backend_names())


def test_only_the_named_one_is_imported(install: Install) -> None:
    install("mine", "foreign_backend:make", "def make(deployment): return deployment\n")
    assert "mine" in backend_names() and "foreign_backend" not in sys.modules
    load_backend("echo")
    assert "foreign_backend" not in sys.modules
    assert load_backend("mine").__name__ == "make"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"no backend is called 'atb'.*echo.*mindspore"):
        load_backend("atb")


@pytest.mark.parametrize(
    ("value", "source", "words"),
    [
        ("foreign_backend:make", "import no_such_module", "No module named 'no_such_module'"),
        ("foreign_backend:other", "", "other"),
        ("foreign_backend:make", "make = 3", "must be callable with a Deployment, but is int"),
    ],
)
def test_a_broken_one_says_why_and_whose(
    install: Install, value: str, source: str, words: str
) -> None:
    install("mine", value, source)
    with pytest.raises(ConfigError, match=r"'mine'.* of foreign") as caught:
        load_backend("mine")
    assert words in str(caught.value)


def test_two_of_one_name_are_refused(install: Install) -> None:
    install("echo", "foreign_backend:make", "make = print")
    with pytest.raises(ConfigError, match=r"Two backends are called 'echo'.*uninstall one"):
        load_backend("echo")
