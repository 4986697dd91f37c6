"""The console script `mindstream`. Errors a user can act on are one sentence, never a traceback.

Exit status: 0 done, 1 failed, 2 the command line or the deployment is wrong.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from mindstream.plugin.errors import ConfigError, MindstreamError
from mindstream.plugin.model_config import Deployment, load_deployment, shipped_names


class _OneSentence(click.Group):
    """Prints what mindstream raises on purpose as its message alone."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo(f"mindstream: {error}", err=True)
            sys.exit(2)
        except MindstreamError as error:
            click.echo(f"mindstream: {error}", err=True)
            sys.exit(1)


def _say(message: str) -> None:
    click.echo(f"mindstream: {message}", err=True)


def _overrides(_: click.Context, __: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE.")
        found[key.strip()] = value
    return found


_target = click.argument("target", metavar="[NAME|FILE|DIR]", default="smollm2-135m")
_set = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_overrides,
    help="Replaces a value of the yaml, e.g. max_batch_size=8 or cpu.threads=2; repeatable.",
)


@click.group(cls=_OneSentence, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("mindstream"), prog_name="mindstream")
def main() -> None:
    """Token-streaming LLM server for MindSpore that speaks MindIE's wire protocol."""


@main.command()
@_target
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=1025,
    show_default=True,
    help="Port to listen on; 0: a free one.",
)
@click.option("--name", default="", help="Served model name, instead of the yaml's.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
@_set
def serve(
    target: str, host: str, port: int, name: str, log_level: str, overrides: dict[str, str]
) -> None:
    """Serves a deployment: a shipped NAME, a yaml FILE, or a weight DIR with one yaml in it.

    Demo weights that are missing are fetched first. SIGTERM and Ctrl-C let running requests end.
    """
    deployment = _load(target, overrides, name)
    _log_to_stderr(log_level)
    from mindstream.plugin.server import serve as run

    run(deployment, host, port, say=_say, ready=click.echo)


@main.command()
@click.argument("name")
def pull(name: str) -> None:
    """Fetches a demo model into the cache folder and prints its directory."""
    from mindstream.plugin.pull import pull as fetch

    click.echo(fetch(name, _say))


@main.command(name="list")
def list_names() -> None:
    """Lists the shipped deployments."""
    for name in shipped_names():
        click.echo(name)


@main.command()
@_target
@_set
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="File to write the report to; default: mindstream-selftest-NAME.md here.",
)
def selftest(target: str, overrides: dict[str, str], report: Path | None) -> None:
    """Checks a deployment on this machine's device and writes a report for a bug report."""
    from mindstream.plugin.registry import load_backend
    from mindstream.plugin.server import pull_if_missing

    deployment = _load(target, overrides)
    check = getattr(load_backend(deployment.serving.backend), "selftest", None)
    if check is None:
        raise ConfigError(f"Backend {deployment.serving.backend!r} has no self-test.")
    pull_if_missing(deployment, _say)
    passed = check(deployment, report or Path(f"mindstream-selftest-{deployment.name}.md"), _say)
    sys.exit(0 if passed else 1)


@main.group()
def watermark() -> None:
    """The green-list watermark of requests with `watermark: true`."""


@watermark.command()
@click.argument("target", metavar="NAME|FILE|DIR")
@click.argument("text_file", type=click.File(encoding="utf-8"), default="-")
@click.option(
    "--key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Key to test with, instead of the deployment's.",
)
def detect(target: str, text_file: Any, key_file: Path | None) -> None:
    """Says whether a text (a file, or standard input) carries a deployment's watermark.

    Exit status 0: it does; 1: it does not. The deployment gives the tokenizer and the key.
    """
    from mindstream.plugin.tokenizer import open_tokenizer
    from mindstream.plugin.watermark import detect as test_text
    from mindstream.plugin.watermark import load_key

    deployment = _load(target, {})
    key = load_key(deployment, key_file)
    tokenizer = open_tokenizer(deployment)
    try:
        text = text_file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{text_file.name}: byte {error.start} is not UTF-8 text.") from None
    found = test_text(tokenizer.encode(text), key, tokenizer.vocab_size)
    click.echo(
        f"{'watermarked' if found.watermarked else 'not watermarked'}: {found.green} of "
        f"{found.scored} tokens are green, z = {found.z:.2f}, p = {found.p_value:.3g}"
    )
    sys.exit(0 if found.watermarked else 1)


def _load(target: str, overrides: dict[str, str], name: str = "") -> Deployment:
    if name:
        overrides = {**overrides, "serving.name": repr(name)}
    return load_deployment(target, overrides)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # One line a request is ours to write; tornado's has neither id nor timing.
    logging.getLogger("tornado.access").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
