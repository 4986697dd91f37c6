"""The command line as a user meets it: real processes, real sockets, real signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mindstream.plugin.cli import main
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.server import bind, pull_if_missing

Serve = Callable[..., Any]


def mindstream(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mindstream.plugin.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, method="POST"), timeout=60)


class TestServe:
    def test_it_serves_until_sigterm(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--name", "parrot")
        with post(f"{server.url}/v2/models/parrot/generate", {"text_input": "hello"}) as reply:
            assert json.load(reply)["text_output"] == "hello"
        assert f"curl -N {server.url}/v2/models/parrot/generate_stream" in server.text
        assert server.stop() == 0
        assert "Traceback" not in server.text and server.text.endswith("stopped\n")

    def test_ctrl_c_too(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--log-level", "error")
        assert server.stop(signal.SIGINT) == 0
        assert "Traceback" not in server.text

    def test_sigterm_lets_a_running_stream_end(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--set", "echo.delay_ms=20")
        body = {"text_input": "x" * 60, "parameters": {"max_new_tokens": 60}}
        with post(f"{server.url}/v2/models/echo/generate_stream", body) as reply:
            first = reply.readline()
            server.process.send_signal(signal.SIGTERM)
            rest = reply.read().decode()
        events = [line for line in (first.decode() + rest).splitlines() if line]
        assert len(events) == 60 and "error" not in events[-1]
        assert server.process.wait(60) == 0

    def test_a_second_signal_ends_it_at_once(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--set", "echo.delay_ms=1000")
        body = {"text_input": "x" * 100, "parameters": {"max_new_tokens": 100}}
        reply = post(f"{server.url}/v2/models/echo/generate_stream", body)
        reply.readline()
        server.process.send_signal(signal.SIGTERM)
        while "second signal" not in server.text:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        reply.close()

    def test_no_mindspore_is_imported_for_another_backend(self, serve_process: Serve) -> None:
        server = serve_process("echo", PYTHONPROFILEIMPORTTIME="1")
        assert server.stop() == 0
        assert "tornado.web" in server.text  # so that the list is really there
        assert "mindspore" not in {line.rpartition("|")[2].strip() for line in server.lines}

    def test_a_port_in_use(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            done = mindstream("serve", "echo", "--port", str(port))
        assert done.returncode == 2
        assert f"Cannot listen on 127.0.0.1:{port}: Address already in use (errno 98" in done.stderr
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr

    def test_a_host_that_is_not_ours(self) -> None:
        with pytest.raises(ConfigError, match=r"203\.0\.113\.1:0.*errno 99"):
            bind("203.0.113.1", 0)
        with pytest.raises(ConfigError, match="--host no such host: no such address"):
            bind("no such host", 0)

    def test_nothing_listens_before_the_model_is_ready(self) -> None:
        (sock,) = bind("127.0.0.1", 0)
        with sock, pytest.raises(ConnectionRefusedError):
            socket.create_connection(sock.getsockname())

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["no-such-name"], "'no-such-name' is neither a file"),
            (["echo", "--set", "backend=atb"], "no backend is called 'atb'"),
            (["echo", "--set", "max_batch_size=0"], "serving.max_batch_size must be"),
            (["echo", "--set", "tokenizer=auto"], "needs a weight directory"),
            (["qwen3-8b"], "the weight directory /data/models/Qwen3-8B does not exist; set"),
            (["echo", "--set", "oops"], "is not KEY=VALUE"),
            (["echo", "--port", "70000"], "0<=x<=65535"),
        ],
    )
    def test_what_cannot_start_is_one_sentence(self, arguments: list[str], words: str) -> None:
        options = ["--port", "0"] if "--port" not in arguments else []
        done = CliRunner().invoke(main, ["serve", *options, *arguments])
        assert done.exit_code == 2
        assert words in done.output and "Traceback" not in done.output


class TestPullIfMissing:
    @pytest.fixture
    def pulled(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
        monkeypatch.setenv("MINDSTREAM_CACHE", str(tmp_path))
        names: list[str] = []

        def pull(name: str, progress: Callable[[str], None]) -> None:
            names.append(name)

        monkeypatch.setattr("mindstream.plugin.pull.pull", pull)
        return names

    def test_missing_weights_are_fetched(self, pulled: list[str]) -> None:
        said: list[str] = []
        pull_if_missing(load_deployment("smollm2-135m"), said.append)
        assert pulled == ["smollm2-135m"] and "missing" in said[0]

    def test_present_ones_are_not(self, pulled: list[str], tmp_path: Path) -> None:
        (tmp_path / "models/smollm2-135m").mkdir(parents=True)
        pull_if_missing(load_deployment("smollm2-135m"), print)
        assert pulled == []


class TestOtherCommands:
    def test_list(self) -> None:
        assert CliRunner().invoke(main, ["list"]).output.split()[:2] == ["echo", "qwen2.5-7b"]

    def test_pull_of_an_unknown_model(self) -> None:
        done = CliRunner().invoke(main, ["pull", "gpt-9"])
        assert done.exit_code == 2 and "smollm2-135m" in done.output

    def test_selftest_of_a_backend_without_one(self) -> None:
        done = CliRunner().invoke(main, ["selftest", "echo"])
        assert done.exit_code == 2 and "'echo' has no self-test" in done.output

    def test_watermark_detect_on_plain_text(self) -> None:
        text = "The quick brown fox jumps over the lazy dog and goes on to the next field."
        done = CliRunner().invoke(main, ["watermark", "detect", "echo"], input=text)
        assert done.exit_code == 1 and done.output.startswith("not watermarked: ")

    def test_watermark_detect_of_bytes_that_are_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "t").write_bytes(b"ab\xff")
        done = CliRunner().invoke(main, ["watermark", "detect", "echo", str(tmp_path / "t")])
        assert done.exit_code == 2 and "byte 2 is not UTF-8" in done.output

    def test_help_is_quick_and_loads_no_server(self) -> None:
        code = (
            "import sys; from mindstream.plugin.cli import main\n"
            "try: main(['--help'])\nexcept SystemExit: pass\n"
            "sys.exit('tornado' in sys.modules or 'tokenizers' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
