"""The KV cache's blocks: who holds which, which are shared, which can be had. Pure bookkeeping.

A block holds the K and V of `block_size` consecutive tokens of a sequence. Full blocks are known by
a digest of everything up to their last token, so sequences that begin alike share them. A block
nobody holds keeps its content until it is needed for something else, least recently used first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


class IntegrityError(RuntimeError):
    """The block accounting contradicts itself: a bug in the engine, never a request's fault."""


def root_digest(salt: str) -> bytes:
    """Where a chain of digests starts: different for every salt, so salts never share a block."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block: of its tokens and, through `parent`, of all tokens before them.

    Collision resistant, so that nobody can craft a prompt that reads another prompt's cache.
    """
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class BlockPool:
    """Blocks 0..num_blocks-1 with reference counts. One pool serves one model: nothing is shared
    across models, and across adapters the salt keeps blocks apart.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, nothing worth keeping inside
        self._idle: OrderedDict[int, None] = OrderedDict()  # free but known, oldest use first
        self._digests: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that can be taken now, those with reusable content included."""
        return len(self._blank) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` tokens fill."""
        return -(-tokens // self.block_size)

    def lookup(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain. Changes nothing."""
        found: list[int] = []
        for digest in digests:
            block = self._known.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def missing(self, shared: Sequence[int], fresh: int) -> int:
        """How many blocks are lacking to take `shared` and `fresh` more; 0 or less: it works."""
        revived = sum(1 for block in shared if not self._refs[block])
        return fresh + revived - self.free

    def solely_held(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that would become free if their one holder let go."""
        return [block for block in blocks if self._refs[block] == 1]

    def take(self, shared: Sequence[int], fresh: int) -> list[int]:
        """One more reference to each of `shared`, and `fresh` blocks with unknown content.

        Raises IntegrityError if there are not enough; ask `missing` first.
        """
        if self.missing(shared, fresh) > 0:
            raise IntegrityError(f"{fresh} blocks asked for, {self.free} are free")
        for block in shared:
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1
        return [*shared, *(self._take_one() for _ in range(fresh))]

    def _take_one(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._known[self._digests.pop(block)]
        self._refs[block] = 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a held, full block findable. A second block of the same content stays private."""
        if self._prefix_cache and digest not in self._known and block not in self._digests:
            self._known[digest] = block
            self._digests[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each. The tail goes first: beginnings are shared more."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            if self._refs[block] < 0:
                raise IntegrityError(f"block {block} was released more often than taken")
            if block in self._digests:
                self._idle[block] = None
            else:
                self._blank.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares all accounts with the block tables of the living sequences.

        Raises IntegrityError on the first contradiction. Linear in the pool's size.
        """
        held = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a block table holds a block twice: {list(table)}")
            for block in table:
                held[block] += 1
        if held != self._refs:
            wrong = [b for b in range(self.num_blocks) if held[b] != self._refs[b]]
            raise IntegrityError(f"reference counts of blocks {wrong} differ from the block tables")
        free = sorted([*self._blank, *self._idle])
        if free != [block for block in range(self.num_blocks) if not held[block]]:
            raise IntegrityError("the free lists are not the blocks without a reference")
        if self._digests != {block: digest for digest, block in self._known.items()}:
            raise IntegrityError("the prefix cache's two directions differ")
        if any(block in self._digests for block in self._blank):
            raise IntegrityError("a blank block has known content")
        if any(block not in self._digests for block in self._idle):
            raise IntegrityError("an idle block has no known content")
