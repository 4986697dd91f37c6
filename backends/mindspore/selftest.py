"""`mindstream selftest`: proves an installation on whatever device it runs on, and writes a report.

Three stages, each in processes that end before the next begins, so that a device is loaded once at
a time: what is installed, the model driven step by step, and a request through the whole server.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import yaml

from mindstream.backends.mindspore import environment
from mindstream.backends.mindspore.selftest_checks import Outcome, check_model
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment

_START_SECONDS = 1800  # an NPU compiles large graphs for many minutes
_ANSWER_SECONDS = 300
_PROMPT = "Gravity is"
_TOKENS = 8


def run_selftest(deployment: Deployment, report: Path, say: Callable[[str], None]) -> bool:
    """Runs all checks, writes `report` and returns whether all passed. Blocks for minutes."""
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    outcomes: list[Outcome] = []
    stages: list[tuple[str, Callable[[Deployment], list[Outcome]]]] = [
        ("checking what is installed", _check_versions),
        ("loading the model and comparing its steps", _check_steps),
        ("serving it and streaming a request", _check_server),
    ]
    for title, stage in stages:
        say(title)
        found = stage(deployment)
        outcomes += found
        for outcome in found:
            say(f"  {'ok  ' if outcome.passed else 'FAIL'} {outcome.name}: {outcome.detail}")
        if not all(outcome.passed for outcome in found):
            break
    try:
        report.write_text(_report(deployment, began, outcomes), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {report}: cannot be written: {error.strerror}.") from None
    say(f"report: {report}")
    return all(outcome.passed for outcome in outcomes)


def _check_versions(deployment: Deployment) -> list[Outcome]:
    try:
        found = environment.versions()
    except ConfigError as error:
        return [Outcome("versions", False, str(error))]
    listed = ", ".join(f"{package} {number}" for package, number in found.items())
    return [Outcome("versions", True, listed)]


def _check_steps(deployment: Deployment) -> list[Outcome]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(check_model, deployment).result()
        except BrokenProcessPool:
            return [Outcome("load", False, "the process that ran the model died")]


def _check_server(deployment: Deployment) -> list[Outcome]:
    try:
        with _served(deployment) as url:
            began = time.monotonic()
            body = json.dumps({"text_input": _PROMPT, "parameters": {"max_new_tokens": _TOKENS}})
            target = f"{url}/v2/models/{deployment.name}/generate_stream"
            request = urllib.request.Request(target, body.encode(), method="POST")
            texts, arrivals = [], []
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                for line in answer:
                    if line.startswith(b"data:"):
                        texts.append(json.loads(line[5:])["text_output"])
                        arrivals.append(time.monotonic() - began)
    except (ConfigError, OSError, urllib.error.URLError, ValueError, KeyError) as error:
        return [Outcome("stream", False, f"{type(error).__name__}: {error}")]
    if not texts:
        return [Outcome("stream", False, "the stream held no event")]
    detail = (
        f"{len(texts)} events, the first after {arrivals[0] * 1e3:.0f} ms, the last after "
        f"{arrivals[-1] * 1e3:.0f} ms; {_PROMPT + ''.join(texts)!r}"
    )
    return [Outcome("stream", True, detail)]


@contextmanager
def _served(deployment: Deployment) -> Iterator[str]:
    """A server of its own for the deployment, on a free port; gives its URL."""
    with tempfile.TemporaryDirectory(prefix="mindstream-selftest-") as folder:
        file = Path(folder) / f"{deployment.name}.yaml"
        file.write_text(yaml.safe_dump(_as_yaml(deployment)), encoding="utf-8")
        command = [sys.executable, "-c", "from mindstream.plugin.cli import main; main()"]
        command += ["serve", str(file), "--port", "0", "--log-level", "warning"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        limit = threading.Timer(_START_SECONDS, process.kill)
        limit.start()
        try:
            yield _ready_url(process)
        finally:
            limit.cancel()
            process.terminate()
            process.communicate()


def _as_yaml(deployment: Deployment) -> dict[str, object]:
    """The deployment with its overrides, as a file again."""
    serving = asdict(deployment.serving)
    serving |= {"name": deployment.name, "model_weight_path": str(deployment.model_dir)}
    return {**deployment.mindformers, "serving": serving}


def _ready_url(process: subprocess.Popen[str]) -> str:
    """Waits for the line that says where the server listens; the deadline kills the process."""
    said: list[str] = []
    assert process.stdout is not None  # it was asked for
    for line in process.stdout:
        said.append(line.strip())
        _, found, rest = line.partition(" is ready on ")
        if found:
            return rest.split()[0]
    raise ConfigError(f"the server did not start: {' '.join(said[-3:])}")


def _report(deployment: Deployment, began: str, outcomes: list[Outcome]) -> str:
    passed = sum(outcome.passed for outcome in outcomes)
    facts = {
        "mindstream": version("mindstream"),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{_processor()}, {environment.core_count()} cores",
        "deployment": str(deployment.path),
        "weight directory": str(deployment.model_dir),
        "started": began,
    }
    lines = [f"# mindstream self-test of {deployment.name}: {passed} of {len(outcomes)} passed", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| check | result | detail |", "|---|---|---|"]
    for outcome in outcomes:
        detail = outcome.detail.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {outcome.name} | {'ok' if outcome.passed else 'FAILED'} | {detail} |")
    lines += ["", "Deployment as it was read:", "", "```yaml"]
    lines += [yaml.safe_dump(_as_yaml(deployment), sort_keys=False).rstrip(), "```", ""]
    return "\n".join(lines)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or os.uname().machine
