"""The engine every step-wise backend shares: batches, KV blocks, sampling; no device, no HTTP."""

from mindstream.backends.engine.backend import EngineBackend

__all__ = ["EngineBackend"]
