"""The example package installs, is found by its entry point, passes its own tests and serves."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

EXAMPLE = Path(__file__).parents[1] / "docs" / "example_backend"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the package's folder, and an environment in which it is installed."""
    source = tmp_path_factory.mktemp("example") / "source"
    # A build leaves files beside the sources; the repository stays clean.
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    target = source.with_name("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", f"--target={target}", str(source)],
        check=True,
        timeout=120,
    )
    (source / "mindstream_uppercase.py").unlink()  # what runs below is the installed one
    return source, {**os.environ, "PYTHONPATH": str(target)}


def test_its_own_tests_pass(installed: tuple[Path, dict[str, str]]) -> None:
    source, environment = installed
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "--rootdir", str(source), "-c", os.devnull, "test_uppercase.py"],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout


def test_it_serves(installed: tuple[Path, dict[str, str]]) -> None:
    source, environment = installed
    mindstream = Path(sys.executable).with_name("mindstream")
    with subprocess.Popen(
        [mindstream, "serve", "uppercase.yaml", "--port", "0"],
        cwd=source,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            url = urlsplit(next(word for word in ready.split() if word.startswith("http://")))
            assert stream(url.hostname or "", url.port or 0, "grüße") == "GRüßE"
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0


def stream(host: str, port: int, text: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    body = json.dumps({"text_input": text, "parameters": {"details": True}})
    connection.request("POST", "/v2/models/uppercase/generate_stream", body)
    response = connection.getresponse()
    assert response.status == 200
    events = response.read().decode().split("\n\n")
    connection.close()
    assert events.pop() == ""
    documents = [json.loads(event.removeprefix("data:")) for event in events]
    assert len(documents) == len(text.encode())
    assert documents[-1]["details"]["finish_reason"] == "eos_token"
    return "".join(document["text_output"] for document in documents)
