"""A backend that streams the prompt back: for demonstrations, tests and overhead measurements."""

from mindstream.backends.echo.backend import EchoBackend

__all__ = ["EchoBackend"]
