"""The block pool: what is shared, what is evicted, and that the accounts always add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindstream.backends.engine.kv_blocks import (
    BlockPool,
    IntegrityError,
    block_digest,
    root_digest,
)


def chain(tokens: list[int], size: int, salt: str = "") -> list[bytes]:
    digests = [root_digest(salt)]
    for start in range(0, len(tokens) - size + 1, size):
        digests.append(block_digest(digests[-1], tokens[start : start + size]))
    return digests[1:]


def filled(pool: BlockPool, digests: list[bytes]) -> list[int]:
    blocks = pool.take((), len(digests))
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    return blocks


def test_a_published_beginning_is_found_up_to_the_first_difference() -> None:
    pool = BlockPool(8, 2)
    blocks = filled(pool, chain([1, 2, 3, 4, 5, 6], 2))
    assert pool.lookup(chain([1, 2, 3, 4, 9, 9], 2)) == blocks[:2]
    assert pool.lookup(chain([9, 2, 3, 4, 5, 6], 2)) == []


def test_a_block_is_known_by_everything_before_it_and_by_the_salt() -> None:
    pool = BlockPool(8, 2)
    filled(pool, chain([1, 2, 3, 4], 2, "adapter a"))
    assert pool.lookup(chain([1, 2, 3, 4], 2, "adapter b")) == []
    assert pool.lookup(chain([3, 4], 2, "adapter a")) == []
    assert len(pool.lookup(chain([1, 2, 3, 4], 2, "adapter a"))) == 2


def test_released_blocks_stay_known_until_their_room_is_needed_oldest_first() -> None:
    pool = BlockPool(4, 1)
    old, new = chain([1, 2], 1), chain([7, 8], 1)
    pool.release(filled(pool, old))
    pool.release(filled(pool, new))
    assert pool.free == 4
    pool.take((), 1)
    # The tail of the older chain went first, its beginning is still worth something.
    assert len(pool.lookup(old)) == 1
    assert len(pool.lookup(new)) == 2
    pool.take((), 1)
    assert pool.lookup(old) == []
    assert len(pool.lookup(new)) == 2


def test_using_a_block_again_makes_it_young() -> None:
    pool = BlockPool(2, 1)
    first, second = chain([1], 1), chain([2], 1)
    pool.release(filled(pool, first))
    pool.release(filled(pool, second))
    pool.release(pool.take(pool.lookup(first), 0))
    pool.take((), 1)
    assert pool.lookup(first)
    assert not pool.lookup(second)


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(2, 1)
    blocks = filled(pool, chain([1], 1))
    again = pool.take(blocks, 0)
    assert again == blocks
    pool.release(blocks)
    assert pool.free == 1
    pool.release(again)
    assert pool.free == 2


def test_a_second_copy_of_a_content_stays_private() -> None:
    pool = BlockPool(3, 1)
    known = filled(pool, chain([1], 1))
    copy = filled(pool, chain([1], 1))
    assert pool.lookup(chain([1], 1)) == known
    pool.release(copy)
    pool.check_integrity([known])


def test_without_prefix_cache_nothing_is_ever_found() -> None:
    pool = BlockPool(2, 1, prefix_cache=False)
    pool.release(filled(pool, chain([1], 1)))
    assert pool.lookup(chain([1], 1)) == []
    pool.check_integrity([])


def test_missing_counts_revived_blocks_as_taken() -> None:
    pool = BlockPool(2, 1)
    shared = filled(pool, chain([1], 1))
    pool.release(shared)
    assert pool.free == 2
    assert pool.missing(shared, 1) == 0
    assert pool.missing(shared, 2) == 1
    with pytest.raises(IntegrityError, match="2 blocks asked for, 2 are free"):
        pool.take(shared, 2)


def test_check_integrity_sees_a_lost_block_and_a_double_release() -> None:
    pool = BlockPool(2, 1)
    blocks = pool.take((), 1)
    with pytest.raises(IntegrityError, match="reference counts of blocks"):
        pool.check_integrity([])
    pool.release(blocks)
    with pytest.raises(IntegrityError, match="more often than taken"):
        pool.release(blocks)


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.sampled_from(["", "x"])),
        max_size=30,
    ),
    leave=st.lists(st.integers(0, 100), max_size=40),
    size=st.integers(1, 3),
)
def test_any_order_of_taking_and_releasing_keeps_the_accounts(
    prompts: list[tuple[list[int], str]], leave: list[int], size: int
) -> None:
    pool = BlockPool(10, size)
    held: list[tuple[list[int], list[bytes]]] = []
    departures = iter(leave)
    for tokens, salt in prompts:
        digests = chain(tokens, size, salt)
        shared = pool.lookup(digests)
        for block, digest in zip(shared, digests, strict=False):
            assert pool.lookup([digest]) == [block]
        fresh = pool.blocks_for(len(tokens)) - len(shared)
        if pool.missing(shared, fresh) <= 0:
            blocks = pool.take(shared, fresh)
            for block, digest in zip(blocks, digests, strict=False):
                pool.publish(block, digest)
            held.append((blocks, digests))
        for index in (next(departures, None), next(departures, None)):
            if index is not None and held:
                pool.release(held.pop(index % len(held))[0])
        pool.check_integrity([blocks for blocks, _ in held])
    for blocks, _ in held:
        pool.release(blocks)
    pool.check_integrity([])
    assert pool.free == 10
