"""Wrong calls of every kind, on whatever a manager has at the time: each must raise."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any


class World:
    """A manager in use, things that it has seen the end of, and another manager's things.

    `running` has tables and their sequences, at least one when a misuse is tried.
    """

    def __init__(self, cache: Any, stranger: Any) -> None:
        self.cache = cache
        self.running: list[tuple[Any, Any]] = []
        self.stranger = stranger
        self.freed, _, self.released = _used(cache)
        cache.release(self.released)
        cache.free(self.freed)
        self.other_table, self.other_seq, self.other_pin = _used(stranger)
        self.other_hit = stranger.lookup(self.other_seq)

    def one(self, rng: Random) -> tuple[Any, Any]:
        return rng.choice(self.running)


def _used(cache: Any) -> tuple[Any, Any, Any]:
    table, seq = cache.table(), cache.sequence(range(1000, 1040))
    cache.allocate(table, 1)
    cache.commit(table, seq, 1)
    return table, seq, cache.reserve(table, 1)


def _more(rng: Random) -> int:
    """From one too many to the largest that fits a machine's integer."""
    return rng.choice([1, 1, 2, 7, 2**31, 2**40, 2**62])


def _bad_block(w: World, rng: Random) -> object:
    return w.cache.block(rng.choice([-1, -_more(rng), w.cache.num_blocks - 1 + _more(rng)]))


def _bad_group(w: World, rng: Random) -> object:
    group = rng.choice([-1, -7, 1 << 20, 2**31 - 1])
    return rng.choice(
        [lambda: w.cache.lookup(w.one(rng)[1], group), lambda: w.cache.table(group=group)]
    )()


def _bad_token(w: World, rng: Random) -> object:
    bad = [rng.randrange(2**31) for _ in range(rng.randrange(9))]
    bad.insert(rng.randint(0, len(bad)), rng.choice([-1, -(2**31), 2**31, 2**63, 2**70]))
    return rng.choice([w.one(rng)[1].append, w.cache.sequence])(bad)


def _bad_extra(w: World, rng: Random) -> object:
    start, stop = rng.choice([(3, 3), (3, 2), (-1, 2), (-5, -1), (2**40, 2**40)])
    return w.cache.sequence([1, 2, 3], extra=[(start, stop, b"image")])


def _shrink(w: World, rng: Random) -> object:
    table, _ = w.one(rng)
    return w.cache.allocate(table, table.num_tokens - _more(rng))


def _commit_less(w: World, rng: Random) -> object:
    table, seq = w.one(rng)
    return w.cache.commit(table, seq, table.num_computed_tokens - _more(rng))


def _commit_more(w: World, rng: Random) -> object:
    table, seq = w.one(rng)
    return w.cache.commit(table, seq, min(table.num_tokens, seq.num_tokens) + _more(rng))


def _commit_another_sequence(w: World, rng: Random) -> object:
    """Where nothing is computed yet any sequence may start, but none has a negative length."""
    table, seq = w.one(rng)
    if table.num_computed_tokens == 0:
        return w.cache.commit(table, seq, -1)
    other = w.cache.sequence([2**31 - 1] * 200)
    return w.cache.commit(table, other, table.num_computed_tokens)


def _reserve_none(w: World, rng: Random) -> object:
    return w.cache.reserve(w.one(rng)[0], rng.choice([0, -_more(rng)]))


def _reserve_more(w: World, rng: Random) -> object:
    table, _ = w.one(rng)
    return w.cache.reserve(table, table.num_computed_tokens + _more(rng))


def _many_of_other_lengths(w: World, rng: Random) -> object:
    table, seq = w.one(rng)
    room = table.num_tokens
    return rng.choice(
        [
            lambda: w.cache.allocate_many([table], []),
            lambda: w.cache.allocate_many([], [room]),
            lambda: w.cache.allocate_many([table], [room, room]),
            lambda: w.cache.commit_many([table], [seq], []),
            lambda: w.cache.commit_many([table], [], [1]),
            lambda: w.cache.commit_many([], [seq], [1]),
        ]
    )()


def _same_table_twice(w: World, rng: Random) -> object:
    table, seq = w.one(rng)
    room = table.num_tokens
    return rng.choice(
        [
            lambda: w.cache.allocate_many([table, table], [room, room]),
            lambda: w.cache.commit_many([table, table], [seq, seq.fork()], [1, 1]),
        ]
    )()


def _same_sequence_twice(w: World, rng: Random) -> object:
    table, seq = w.one(rng)
    return w.cache.commit_many([table, w.cache.table()], [seq, seq], [1, 1])


def _many_with_one_bad(w: World, rng: Random) -> object:
    """A good table first, of which nothing may have been done when the bad one is met."""
    good = [(t, s) for t, s in w.running if t.num_computed_tokens < t.num_tokens]
    table, seq = rng.choice(good or w.running)
    bad = rng.choice([w.freed, w.other_table])
    return rng.choice(
        [
            lambda: w.cache.allocate_many([table, bad], [table.num_tokens, 8]),
            lambda: w.cache.allocate_many([table, w.cache.table()], [table.num_tokens + 1, -1]),
            lambda: w.cache.commit_many([table, bad], [seq, w.cache.sequence([1])], [1, 1]),
            lambda: w.cache.commit_many([table], [w.other_seq], [1]),
            lambda: w.cache.commit_many([table], [seq], [rng.choice([-1, 2**31])]),
            lambda: w.cache.commit_many([w.cache.table()], [w.cache.sequence([1])], [1]),
        ]
    )()


def _freed_table(w: World, rng: Random) -> object:
    return _on_table(w, rng, w.freed)


def _another_caches_table(w: World, rng: Random) -> object:
    return _on_table(w, rng, w.other_table)


def _on_table(w: World, rng: Random, table: Any) -> object:
    seq = w.one(rng)[1]
    return rng.choice(
        [
            lambda: w.cache.free(table),
            lambda: w.cache.allocate(table, rng.randrange(1, 50)),
            lambda: w.cache.commit(table, seq, 1),
            lambda: w.cache.fork(table),
            lambda: w.cache.reserve(table, 1),
        ]
    )()


def _another_caches_sequence(w: World, rng: Random) -> object:
    table, _ = w.one(rng)
    return rng.choice(
        [
            lambda: w.cache.lookup(w.other_seq),
            lambda: w.cache.commit(table, w.other_seq, table.num_computed_tokens),
        ]
    )()


def _another_caches_hit(w: World, rng: Random) -> object:
    return w.cache.allocate(w.cache.table(), rng.randrange(1, 50), w.other_hit)


def _a_hit_for_a_table_in_use(w: World, rng: Random) -> object:
    """Where the hit is empty it may start any table, but not shrink one."""
    table, seq = w.one(rng)
    hit = w.cache.lookup(seq, table.group)
    if not hit.num_tokens or not table.blocks:
        return w.cache.allocate(table, table.num_tokens - 1, hit)
    return w.cache.allocate(table, max(table.num_tokens, hit.num_tokens), hit)


def _less_room_than_the_hit(w: World, rng: Random) -> object:
    table, seq = w.one(rng)
    hit = w.cache.lookup(seq, table.group)
    return w.cache.allocate(w.cache.table(group=table.group), hit.num_tokens - 1 or -1, hit)


def _release_twice(w: World, _: Random) -> object:
    return w.cache.release(w.released)


def _release_another_caches_pin(w: World, _: Random) -> object:
    return w.cache.release(w.other_pin)


def _write_what_is_shared(w: World, rng: Random) -> object:
    """A fork shares all blocks, and where there is no room it is too much anyway."""
    table, seq = w.one(rng)
    return w.cache.commit(w.cache.fork(table), seq, table.num_computed_tokens + 1)


MISUSES: list[Callable[[World, Random], object]] = [
    _bad_block,
    _bad_group,
    _bad_token,
    _bad_extra,
    _shrink,
    _commit_less,
    _commit_more,
    _commit_another_sequence,
    _reserve_none,
    _reserve_more,
    _many_of_other_lengths,
    _same_table_twice,
    _same_sequence_twice,
    _many_with_one_bad,
    _freed_table,
    _another_caches_table,
    _another_caches_sequence,
    _another_caches_hit,
    _a_hit_for_a_table_in_use,
    _less_room_than_the_hit,
    _release_twice,
    _release_another_caches_pin,
    _write_what_is_shared,
]
