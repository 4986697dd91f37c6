"""Decides which tokens the next step computes. Pure: no thread, no clock, no device.

Every step that `schedule` gives is handed back by `update` or `discard`, in the order of schedule;
`add`, `stop` and `abort` come at any moment. One step takes, in this order: waiting requests that
fit join the running ones; every running sequence that only lacks its last token gets it (decode),
so a long prompt stalls nobody; what is left of the token budget, as far as `pacing` allows, is
shared among the prompts in chunks.

Several steps may be in flight. A sequence is in one of them at most, and until that one lands it is
neither scheduled nor preempted, and keeps its blocks even if it ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass
from math import inf

from mindstream.backends.engine import messages
from mindstream.backends.engine.kv_blocks import BlockPool
from mindstream.backends.engine.messages import Delta, Stats
from mindstream.backends.engine.pacing import Pacer
from mindstream.backends.engine.residency import Residency
from mindstream.backends.engine.sequence import Sequence, urgency
from mindstream.backends.engine.step_model import Batch
from mindstream.plugin.backend import Limits
from mindstream.plugin.errors import Overloaded, RequestRefused
from mindstream.plugin.request import GenerationRequest
from mindstream.plugin.serving_config import ServingConfig


@dataclass(frozen=True, slots=True)
class Step:
    """A batch and whose it is. `sampling[r]` is the sequence of the batch's logits row r."""

    batch: Batch
    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]  # and how many of its tokens
    sampling: list[Sequence]
    began: float

    def members(self) -> Iterator[Sequence]:
        """Every sequence of the step, in batch order."""
        yield from self.decodes
        for sequence, _ in self.chunks:
            yield sequence

    @property
    def size(self) -> int:
        """Sequences in the step."""
        return len(self.decodes) + len(self.chunks)


class Scheduler:
    """All requests of one engine. Every method is called from one thread.

    `groups` is how many steps the caller keeps in flight; so many share the decodes evenly.
    """

    def __init__(self, limits: Limits, serving: ServingConfig, groups: int = 1) -> None:
        self._max_seq_len = limits.max_seq_len
        self._budget = serving.max_batched_tokens
        # No more sequences than tokens in a step: every decode is in every step.
        self._slots = min(limits.max_batch_size, serving.max_batch_size, self._budget)
        self._max_waiting = serving.max_waiting
        self._ageing = serving.priority_ageing
        self._prefix_cache = serving.prefix_cache
        self._pool = BlockPool(
            limits.num_blocks, limits.block_size, prefix_cache=serving.prefix_cache
        )
        self._residency = Residency(self._pool, self._slots, prefix_cache=serving.prefix_cache)
        self._sequences: dict[int, Sequence] = {}
        self._groups = groups
        self._landed = -inf  # when the last step landed
        self._arrivals = 0
        self._stats = Stats()
        self._pacer = Pacer()

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._sequences

    @property
    def capacity(self) -> int:
        """Requests it takes in all. When blocks, not slots, are short, fewer can run at once."""
        short = self._residency.short_of_blocks
        return (self._residency.running if short else self._slots) + self._max_waiting

    def stats(self) -> Stats:
        """The counters, and the gauges of this moment."""
        stats, residency = copy(self._stats), self._residency
        stats.running, stats.waiting = residency.running, residency.waiting
        stats.free_blocks, stats.capacity = self._pool.free, self.capacity
        stats.preemptions = residency.preemptions
        return stats

    def add(self, key: int, request: GenerationRequest, submitted: float) -> None:
        """Queues a request. Raises RequestRefused if it can never fit, Overloaded if too many wait.

        `submitted` is the moment its times are counted from.
        """
        self._refuse_what_never_fits(request)
        if len(self._sequences) >= self.capacity:
            raise overloaded(self._residency.waiting, self._max_waiting)
        self._arrivals += 1
        sequence = Sequence(
            key=key,
            request=request,
            urgency=urgency(request.priority, submitted, self._arrivals, self._ageing),
            submitted=submitted,
            ready=submitted,
            tokens=array("i", request.prompt_ids),
            generated=request.generated_before,
        )
        self._sequences[key] = sequence
        self._residency.enqueue(sequence)

    def _refuse_what_never_fits(self, request: GenerationRequest) -> None:
        prompt, new = len(request.prompt_ids), request.max_new_tokens - request.generated_before
        if prompt + new > self._max_seq_len:
            raise RequestRefused(
                f"The prompt's {prompt} tokens and max_new_tokens {new} exceed max_seq_len "
                f"{self._max_seq_len}."
            )
        # The last token is never read back, so it needs no place in the cache.
        blocks = self._pool.blocks_for(prompt + new - 1)
        if blocks > self._pool.num_blocks:
            raise RequestRefused(
                f"The prompt's {prompt} tokens and max_new_tokens {new} need {blocks} KV-cache "
                f"blocks of {self._pool.block_size} tokens; the cache has {self._pool.num_blocks}."
            )

    def stop(self, key: int, now: float) -> Delta | None:
        """Ends a request early and gives its last chunk; None if it has ended already."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return None
        delta = sequence.deliver(messages.NO_TOKEN, messages.STOP, now)
        self._end(sequence)
        return delta

    def abort(self, key: int) -> bool:
        """Ends a request without a word; False if it has ended already."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._end(sequence)
        return sequence is not None

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        sequence.ended = True
        if not sequence.in_flight:  # else the device may still write into its blocks
            self._residency.remove(sequence)

    def schedule(self, now: float) -> Step | None:
        """The next step, or None if there is nothing to do. `now` is when the step begins, or
        queues behind those in flight.
        """
        for sequence in self._residency.admit(self._budget, now):
            self._count_prompt(sequence)
        share = -(-self._residency.running // self._groups)
        decodes = self._residency.pick_decodes(share, now)
        prefilling = self._residency.prefilling
        streaming = self._residency.running - prefilling
        prompts = self._residency.waiting + prefilling
        budget = self._budget - len(decodes)
        allowance = self._pacer.allowance(budget, len(decodes), streaming, prompts)
        chunks = self._pick_chunks(allowance)
        if not decodes and not chunks:
            return None
        sampling = decodes + [s for s, count in chunks if count == s.pending]
        batch = self._residency.builder.build(decodes, chunks)
        step = Step(batch, decodes, chunks, sampling, now)
        for sequence in step.members():
            sequence.in_flight = True
            if sequence.began is None:
                sequence.began = now
        return step

    def _count_prompt(self, sequence: Sequence) -> None:
        if sequence.admitted:
            return
        sequence.admitted = True
        tokens = len(sequence.request.prompt_ids)
        self._stats.prompt_tokens += tokens
        if self._prefix_cache:
            self._stats.prefix_query_tokens += tokens
            self._stats.prefix_hit_tokens += sequence.computed

    def _pick_chunks(self, budget: int) -> list[tuple[Sequence, int]]:
        """Shares `budget` among the prompts.

        Each takes at most half of what is left, so that a long one does not stall those behind it;
        what is left over in the end goes to the most urgent.
        """
        prompts = [s for s in self._residency.each_ready() if s.prefilling]
        counts: list[int] = []
        for place, sequence in enumerate(prompts, 1):
            share = -(-budget // 2) if place < len(prompts) else budget
            counts.append(min(sequence.pending, share))
            budget -= counts[-1]
        for place, sequence in enumerate(prompts):
            more = min(sequence.pending - counts[place], budget)
            counts[place] += more
            budget -= more
        return [chunk for chunk in zip(prompts, counts, strict=True) if chunk[1]]

    def update(self, step: Step, tokens: Many[int], now: float) -> list[Delta]:
        """Takes the step's results: tokens[r] for `step.sampling[r]`, ignored where that has ended.

        Gives one Delta for every living sequence that got a token. `now` is when they were sampled.
        """
        began = max(step.began, self._landed)  # it had to queue behind the step before
        self._pacer.observe(len(step.decodes), sum(n for _, n in step.chunks), now - began)
        for sequence in step.decodes:
            sequence.computed += 1
        for sequence, count in step.chunks:
            sequence.computed += count
        for sequence in step.members():
            self._residency.share(sequence)
            if sequence.began == step.began:
                sequence.began = began
        self._land(step, now)
        return [
            self._advance(sequence, token, now)
            for sequence, token in zip(step.sampling, tokens, strict=True)
            if not sequence.ended
        ]

    def discard(self, step: Step, now: float) -> list[int]:
        """The step failed: ends its sequences, for nobody knows what is in their blocks.

        Gives the keys of those that had not ended before.
        """
        keys = [sequence.key for sequence in step.members() if not sequence.ended]
        for key in keys:
            self.abort(key)
        self._land(step, now)
        return keys

    def _land(self, step: Step, now: float) -> None:
        """No device works on the step any more: blocks of its ended sequences are free."""
        self._landed = now
        for sequence in step.members():
            sequence.in_flight = False
            if sequence.ended:
                self._residency.remove(sequence)

    def _advance(self, sequence: Sequence, token: int, now: float) -> Delta:
        request = sequence.request
        sequence.tokens.append(token)
        sequence.generated += 1
        sequence.prefilling = False
        self._stats.generated_tokens += 1
        finish = messages.RUNNING_ON
        if token in request.eos_token_ids:
            finish = messages.EOS
        elif sequence.generated >= request.max_new_tokens:
            finish = messages.LENGTH
        delta = sequence.deliver(token, finish, now)
        if finish:
            self._end(sequence)
        return delta

    def check_integrity(self) -> None:
        """Raises IntegrityError if block tables and block accounting differ."""
        self._residency.check_integrity()


def overloaded(waiting: int, limit: int, retry_after: int = 1) -> Overloaded:
    """The refusal of a request that finds the queue full; `retry_after` is in seconds."""
    return Overloaded(
        f"{waiting} requests are waiting and serving.max_waiting is {limit}; come back later.",
        retry_after,
    )
