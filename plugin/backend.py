"""The upper seam: what a backend is to the server. `docs/writing-a-backend.md` is the guide.

A backend is registered as an entry point of the group `mindstream.backends` and is called with the
`Deployment`. Every method runs on the event loop and none may block it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Protocol

from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import Chunk, GenerationRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model allows; known once `start()` returned. All counts are in tokens."""

    vocab_size: int  # of the logits; a prompt id must be below it
    max_seq_len: int  # prompt and output together
    max_batch_size: int  # sequences that can run at once
    block_size: int = 1  # tokens a KV-cache block holds
    num_blocks: int = 0  # blocks of the KV cache; 0: the backend has none


class State(str, Enum):
    """Where a backend is in its life."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"  # works, but the next request would be refused as Overloaded
    RESTARTING = "restarting"  # the engine broke and comes back by itself
    FAILED = "failed"  # it stays down; `reason` says why
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """A cheap snapshot for health, metrics and slot counts. Counters count since the start."""

    state: State
    reason: str = ""
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int = 0  # of these, found
    prompt_tokens: int = 0
    generated_tokens: int = 0


class TokenStream(Protocol):
    """One running request: `async with backend.submit(r) as chunks: async for chunk in chunks`.

    Leaving the block early cancels the request: its KV blocks are free by the next step. The
    iterator yields chunks up to the one with a finish_reason, or raises one RequestError.
    """

    async def __aenter__(self) -> AsyncIterator[Chunk]: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...

    def stop(self) -> None:
        """Ends the request early, its last chunk with FinishReason.STOP. After the end: no-op."""


class Backend(Protocol):
    """A model, loaded and answering."""

    @property
    def limits(self) -> Limits:
        """Valid after `start()`."""

    async def start(self) -> None:
        """Loads, compiles and warms up; returns when ready. Raises ConfigError if it cannot."""

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Takes a request or raises now: Overloaded, RequestRefused, ServiceStopped,
        BackendFailed."""

    def status(self) -> BackendStatus:
        """Never raises, at any time of the backend's life."""

    async def stop(self, *, drain: bool) -> None:
        """Refuses new requests; with `drain` lets the running ones end first. Idempotent."""


BackendFactory = Callable[[Deployment], Backend]
