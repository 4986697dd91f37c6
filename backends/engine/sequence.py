"""One request inside the engine, and the rule that orders requests."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from mindstream.backends.engine.kv_blocks import block_digest, root_digest
from mindstream.backends.engine.messages import Delta
from mindstream.plugin.request import GenerationRequest

# (moment in seconds, arrival number); smaller is more urgent.
Urgency = tuple[float, int]


def urgency(priority: int, arrived: float, number: int, ageing: float) -> Urgency:
    """A request of priority p counts as if it had arrived (p - 1) * ageing seconds later.

    So within one priority it is first come, first served; waiting `ageing` seconds makes up for one
    level; and since the value never changes, a request is overtaken only by those that came less
    than 4 * ageing seconds after it: none starves.
    """
    return (arrived + (priority - 1) * ageing, number)


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; the scheduler alone changes it. All moments are seconds of the caller's clock."""

    key: int
    request: GenerationRequest
    urgency: Urgency
    submitted: float
    ready: float  # since when it has waited for a step
    tokens: array[int]  # prompt and output
    generated: int
    computed: int = 0  # leading tokens whose K and V are in the cache
    capacity: int = 0  # tokens its blocks can hold
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, as far as known
    published: int = 0  # leading blocks offered to the prefix cache
    row: int = -1  # in the batch builder; -1: not running
    prefilling: bool = True
    in_flight: bool = False  # in a step whose update has not come
    ended: bool = False
    admitted: bool = False  # has ever run
    waited: float = 0.0  # for the coming token, before the current wait
    began: float | None = None  # when the first step towards the coming token began
    last_token: float | None = None

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def digests_up_to(self, count: int, block_size: int) -> list[bytes]:
        """Digests of the first `count` full blocks."""
        digests = self.digests
        while len(digests) < count:
            start = len(digests) * block_size
            parent = digests[-1] if digests else root_digest(self.request.cache_salt)
            digests.append(block_digest(parent, self.tokens[start : start + block_size]))
        return digests[:count]

    def put_back(self, now: float) -> None:
        """It lost its blocks, and waits again for the token it was working on."""
        if self.began is not None:
            self.waited += self.began - self.ready
            self.began, self.ready = None, now

    def deliver(self, token: int, finish: int, now: float) -> Delta:
        """What to tell the client of a token sampled at `now`; the wait for the next one begins."""
        began = now if self.began is None else self.began
        first = self.last_token is None
        since = self.submitted if self.last_token is None else self.last_token
        delta = Delta(
            self.key,
            token,
            self.generated,
            int((self.waited + began - self.ready) * 1e6),
            first,
            (now - since) * 1e3,
            finish,
        )
        self.last_token = self.ready = now
        self.waited, self.began = 0.0, None
        return delta
