"""The process around MindSpore: versions, environment variables, context. Once per process.

MindSpore's context is global and most of it can be set once; a second deployment in the same
process must want the same settings. Called on the engine thread, before any other use of MindSpore.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mindstream.backends.mindspore.cpu.library import library_path, load_library
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.paths import cache_dir

# The pair that PyPI resolves; MindFormers' internals move between versions.
SUPPORTED = {"mindspore": "2.9.0", "mindformers": "1.9.0"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What of a deployment is global to its process."""

    device: str  # "CPU" or "Ascend"
    threads: int  # of CPU kernels, at least 1


_applied: Settings | None = None


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def versions() -> dict[str, str]:
    """The installed supported pair; raises ConfigError where one is missing or another version."""
    found = {}
    for package, wanted in SUPPORTED.items():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            raise ConfigError(
                f"serving.backend mindspore needs {package} {wanted}, which is not installed: "
                "pip install 'mindstream[mindspore]'."
            ) from None
        if found[package].partition("+")[0] != wanted:
            raise ConfigError(
                f"{package} {found[package]} is installed; this version of mindstream drives "
                f"{' with '.join(f'{p} {v}' for p, v in SUPPORTED.items())}."
            )
    return found


def prepare(settings: Settings, mindformers_yaml: Mapping[str, Any]) -> None:
    """Imports MindSpore and MindFormers and sets their context; raises ConfigError."""
    global _applied
    if _applied is not None:
        if _applied != settings:
            raise ConfigError(f"this process already runs MindSpore with {_applied}.")
        return
    versions()
    _set_environment(settings)
    if settings.device == "CPU" and library_path() is not None:
        # MindSpore opens an operator's library by its name at every step, and the system looks for
        # it among all loaded ones in the order they came: before MindSpore's hundreds, half a
        # millisecond a step is saved.
        load_library()
    with quiet():
        ms = _import_mindspore()
        _import_mindformers()
        try:
            if settings.device == "CPU":
                _cpu_context(ms, settings, mindformers_yaml)
            else:
                _ascend_context(ms, mindformers_yaml)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"context.device_target {settings.device} cannot be used here: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
    _applied = settings


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Around calls of MindFormers that print tables and warn of themselves.

    MindFormers also takes over `warnings.showwarning` when it is imported; leaving gives it back.
    """
    with (
        warnings.catch_warnings(),
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        warnings.simplefilter("ignore")
        yield


def _import_mindspore() -> Any:
    """MindSpore takes sys.argv[0] for the script whose imports decide if a cached graph is stale.

    In a spawned process that is no file; graph_cache keeps track of the sources itself.
    """
    arguments = sys.argv
    sys.argv = [str(Path(__file__).with_name("cpu") / "__init__.py")]
    try:
        return importlib.import_module("mindspore")
    finally:
        sys.argv = arguments


def _import_mindformers() -> None:
    """MindFormers logs to the standard output and to files under LOG_MF_PATH; the files stay."""
    # Not an import statement: the package shadows the module with a class of the same name.
    logger = importlib.import_module("mindformers.tools.logger").get_logger()
    for handler in list(logger.handlers):
        if not isinstance(handler, logging.FileHandler):
            logger.removeHandler(handler)


def _set_environment(settings: Settings) -> None:
    """Before the imports. What the operator has set himself stays."""
    logs = cache_dir() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "RUN_MODE": "predict",
        "LOG_MF_PATH": str(logs / "mindformers"),  # else ./output/log
        "GLOG_v": "3",  # errors only
        "TRANSFORMERS_VERBOSITY": "error",
        "OMP_NUM_THREADS": str(settings.threads),
    }.items():
        os.environ.setdefault(name, value)


def _cpu_context(ms: Any, settings: Settings, mindformers_yaml: Mapping[str, Any]) -> None:
    from mindformers.core.context.build_context import MFContextOperator
    from mindformers.tools.register import MindFormerConfig

    # Without `use_legacy: False` in its context MindFormers takes every model for a legacy one.
    # Its whole build_context would also pin this process to cores, which suits an NPU host alone.
    allocator = os.environ.get("MS_ALLOC_CONF")
    MFContextOperator(MindFormerConfig(**{**mindformers_yaml, "run_mode": "predict"}))
    if allocator is None:  # a setting for Ascend, which MindSpore prints on the standard output
        os.environ.pop("MS_ALLOC_CONF", None)
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
    ms.set_device("CPU")
    # More dispatch threads than idle cores make single steps up to ten times slower.
    ms.runtime.dispatch_threads_num(1)
    ms.device_context.cpu.op_tuning.threads_num(settings.threads)


def _ascend_context(ms: Any, mindformers_yaml: Mapping[str, Any]) -> None:
    from mindformers import build_context
    from mindformers.tools.register import MindFormerConfig

    config = MindFormerConfig(**{**mindformers_yaml, "run_mode": "predict"})
    config.set_value("context.device_target", "Ascend")
    build_context(config)
    # As vllm-mindspore does on Ascend.
    ms.runtime.set_kernel_launch_group(thread_num=4, kernel_group_num=16)
