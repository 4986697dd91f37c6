"""What the event loop and the engine process say to each other: plain data, encoded by msgspec.

A request has a number, its key, on this link: shorter than its id, and never used twice.
"""

from __future__ import annotations

import msgspec

from mindstream.plugin.backend import Limits
from mindstream.plugin.request import FinishReason, GenerationRequest

NO_TOKEN = -1
# Delta.finish is the place in this tuple.
FINISH_REASONS: tuple[FinishReason | None, ...] = (
    None,
    FinishReason.EOS,
    FinishReason.STOP,
    FinishReason.LENGTH,
)
RUNNING_ON, EOS, STOP, LENGTH = range(4)


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Run this. `submitted` is the submitter's CLOCK_MONOTONIC, which all processes share."""

    key: int
    request: GenerationRequest
    submitted: float


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """End it with a last chunk."""

    key: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Forget it: nobody listens any more."""

    key: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Are you there? Answered between two steps with a Report."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Close the model and exit."""


Command = Submit | Stop | Cancel | Ping | Shutdown


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step gave one sequence."""

    key: int
    token: int  # NO_TOKEN: it ended without one
    generated: int  # cumulative
    queue_wait_us: int
    first: bool  # `elapsed_ms` is then prefill time, else decode time
    elapsed_ms: float
    finish: int  # index into FINISH_REASONS


class Failure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request ends with this error: a class of `mindstream.plugin.errors` and its message."""

    key: int
    kind: str
    message: str
    retry_after: int = 1


class Stats(msgspec.Struct, array_like=True, gc=False):
    """The engine's gauges and counters; counters count since the process started."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    capacity: int = 0  # requests the engine takes in all, running and waiting
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Report(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """All that one step, or the commands before it, changed."""

    batch_size: int
    deltas: list[Delta]
    failures: list[Failure]
    stats: Stats


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The model is loaded."""

    limits: Limits
    stats: Stats


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The deployment cannot start; `message` is a ConfigError's."""

    message: str


class Log(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A record of the engine process's `logging`, to be logged by the server's configuration."""

    level: int
    name: str
    text: str


Notice = Report | Ready | Refused | Log
