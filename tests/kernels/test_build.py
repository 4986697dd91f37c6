"""`setup.py` without a compiler, and what the loader says then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindstream.backends.mindspore.cpu import library

ROOT = Path(__file__).parents[2]


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--build-temp", str(tmp_path / "objects")]
    return subprocess.run(
        [*command, "--build-lib", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_without_a_compiler_the_installation_goes_on_and_says_what_is_lost(tmp_path: Path) -> None:
    done = build(tmp_path, CC="/nowhere/cc", CXX="/nowhere/c++")
    assert done.returncode == 0, done.stderr
    assert "the CPU kernels were not built" in done.stderr
    assert "Install a C++17 compiler" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_whoever_requires_the_kernels_gets_the_error(tmp_path: Path) -> None:
    asked = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++", "MINDSTREAM_REQUIRE_KERNELS": "1"}
    assert build(tmp_path, **asked).returncode != 0


def test_an_absent_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSTREAM_KERNELS", "/nowhere/_kernels.so")
    assert library.library_path() is None
    library.load_library.cache_clear()
    try:
        with pytest.raises(FileNotFoundError, match="no C\\+\\+ compiler"):
            library.load_library()
    finally:
        library.load_library.cache_clear()


def test_an_unknown_instruction_set_falls_back_to_the_best(tmp_path: Path) -> None:
    """MINDSTREAM_CPU_ISA only narrows: a name this CPU lacks is not used."""
    code = "from mindstream.backends.mindspore.cpu.library import instruction_set as s; print(s())"
    names = {}
    for wanted in ("", "portable", "no-such"):
        environment = {**os.environ, "MINDSTREAM_CPU_ISA": wanted}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        names[wanted] = done.stdout.strip()
    assert names["portable"] == "portable"
    assert names["no-such"] == names[""]
