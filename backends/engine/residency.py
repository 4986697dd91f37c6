"""Which sequences hold KV blocks, and which wait for some. Part of the scheduler, as pure.

A sequence joins when blocks for all its tokens are free and one more for each running sequence to
grow. If a running one finds no block all the same, the least urgent one, the newest first, gives
its blocks back and waits to be computed again (preemption). A waiting request of a smaller
`priority` number makes running ones of larger numbers give way in the same manner. The most urgent
sequence is never preempted and any admitted sequence fits alone, so there is no deadlock. Who is to
give way but is in flight does so when its step has landed; until then nobody else does instead.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from mindstream.backends.engine.batch import BatchBuilder
from mindstream.backends.engine.kv_blocks import BlockPool
from mindstream.backends.engine.sequence import Sequence

# As many prompts share a step even if the first of them could fill it.
_PROMPTS_SHARING = 4

_Queue = list[tuple[float, int, Sequence]]  # ascending: the most urgent first


class Residency:
    """Waiting and running sequences over one block pool, at most `slots` running."""

    def __init__(self, pool: BlockPool, slots: int, *, prefix_cache: bool) -> None:
        self.pool = pool
        self.builder = BatchBuilder(slots, pool.block_size)
        self.short_of_blocks = False  # slots were left, but no blocks, when last asked to admit
        self.preemptions = 0
        self._slots = slots
        self._prefix_cache = prefix_cache
        self._waiting: _Queue = []
        self._running: _Queue = []

    @property
    def waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences with blocks."""
        return len(self._running)

    @property
    def prefilling(self) -> int:
        """Running sequences that lack more than their last token, in flight or not."""
        return sum(1 for _, _, s in self._running if s.prefilling)

    def each_ready(self) -> Iterator[Sequence]:
        """The running sequences that are not in flight, most urgent first."""
        for _, _, sequence in self._running:
            if not sequence.in_flight:
                yield sequence

    def enqueue(self, sequence: Sequence) -> None:
        """It waits."""
        insort(self._waiting, (*sequence.urgency, sequence))

    def remove(self, sequence: Sequence) -> None:
        """It ended; no device writes into its blocks any more."""
        if sequence.row < 0:
            self._waiting.remove((*sequence.urgency, sequence))
        else:
            self._leave(sequence)

    def admit(self, budget: int, now: float) -> list[Sequence]:
        """Lets waiting sequences join while they can get some of a step's `budget` of tokens.

        Strictly in order of urgency: who does not fit holds back those behind, so nobody starves.
        """
        self.short_of_blocks = False
        joined: list[Sequence] = []
        while self._waiting and self._has_use(budget):
            sequence = self._waiting[0][2]
            shared = self._cached_beginning(sequence)
            fresh = self.pool.blocks_for(len(sequence.tokens)) - len(shared)
            if not self._make_room(sequence, shared, fresh, now):
                self.short_of_blocks = len(self._running) < self._slots
                break
            self._join(sequence, shared, fresh)
            joined.append(sequence)
        return joined

    def _has_use(self, budget: int) -> bool:
        """Whether one more prompt would get a fair share of a step."""
        ready = list(self.each_ready())
        prompts = [s.pending for s in ready if s.prefilling]
        left = budget - len(ready) + len(prompts)
        return left > 0 and (len(prompts) < _PROMPTS_SHARING or sum(prompts) < left)

    def _cached_beginning(self, sequence: Sequence) -> list[int]:
        """Shared blocks it can start from. At least its last token is computed, for the logits."""
        if not self._prefix_cache:
            return []
        full = (len(sequence.tokens) - 1) // self.pool.block_size
        return self.pool.lookup(sequence.digests_up_to(full, self.pool.block_size))

    def _make_room(self, head: Sequence, shared: list[int], fresh: int, now: float) -> bool:
        """Whether `head` can join; less urgent ones of a lower priority give way if need be."""
        running = len(self._running)
        lacking = self.pool.missing(shared, fresh + running)
        victims: list[Sequence] = []
        kept = set(shared)
        for _, _, victim in reversed(self._running):
            if lacking <= 0 and running < self._slots:
                break
            if victim.request.priority <= head.request.priority or victim.urgency < head.urgency:
                return False
            victims.append(victim)
            running -= 1
            # Its blocks, and the one it was to grow by; those it shares with `head` stay in use.
            lacking -= 1 + sum(1 for b in self.pool.solely_held(victim.blocks) if b not in kept)
        if lacking > 0 or running >= self._slots:
            return False
        in_flight = any(victim.in_flight for victim in victims)
        for victim in victims:
            if not victim.in_flight:
                self._preempt(victim, now)
        return not in_flight

    def _join(self, sequence: Sequence, shared: list[int], fresh: int) -> None:
        del self._waiting[0]
        insort(self._running, (*sequence.urgency, sequence))
        sequence.blocks = self.pool.take(shared, fresh)
        sequence.capacity = len(sequence.blocks) * self.pool.block_size
        sequence.computed = len(shared) * self.pool.block_size
        sequence.published = len(shared)
        sequence.prefilling = True
        self.builder.join(sequence)
        self.builder.sync(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove((*sequence.urgency, sequence))
        self.short_of_blocks = False
        self.builder.leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.capacity = sequence.computed = sequence.published = 0

    def _preempt(self, victim: Sequence, now: float) -> None:
        self._leave(victim)
        victim.put_back(now)
        self.enqueue(victim)
        self.preemptions += 1

    def pick_decodes(self, count: int, now: float) -> list[Sequence]:
        """Up to `count` ready sequences that lack only their last token, with a block for it."""
        picked: list[Sequence] = []
        running, index = self._running, 0
        while index < len(running) and len(picked) < count:  # growing may preempt, from the end
            sequence = running[index][2]
            index += 1
            if sequence.prefilling or sequence.in_flight:
                continue
            if sequence.computed < sequence.capacity or self._grow(sequence, now):
                picked.append(sequence)
        return picked

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """One more block, if need be of the least urgent; False if that is the sequence itself, or
        is in flight.
        """
        while not self.pool.free:
            victim = self._running[-1][2]
            if victim.in_flight:
                return False
            self._preempt(victim, now)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.take((), 1)
        sequence.capacity += self.pool.block_size
        self.builder.sync(sequence)
        return True

    def share(self, sequence: Sequence) -> None:
        """Offers the blocks it has filled since the last call to the prefix cache."""
        full = sequence.computed // self.pool.block_size
        if not self._prefix_cache or full <= sequence.published:
            return
        digests = sequence.digests_up_to(full, self.pool.block_size)
        for index in range(sequence.published, full):
            self.pool.publish(sequence.blocks[index], digests[index])
        sequence.published = full

    def check_integrity(self) -> None:
        """Raises IntegrityError if block tables and block accounting differ."""
        self.pool.check_integrity(s.blocks for _, _, s in self._running)
