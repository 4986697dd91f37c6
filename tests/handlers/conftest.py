"""The fixtures of every test here."""

from mindstream.handlers.testing import loop_thread, server, start_server

__all__ = ["loop_thread", "server", "start_server"]
