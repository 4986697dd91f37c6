"""The primary backend: MindFormers models in MindSpore graph mode. Imports no MindSpore."""

from mindstream.backends.mindspore.backend import MindSporeBackend

__all__ = ["MindSporeBackend"]
