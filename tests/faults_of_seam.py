"""Faults that any of the systems may have, each as a class made of the right one."""

from __future__ import annotations

from typing import Any

from reference import BlockTable, Grant, Manager, Pin

Fault = type[Manager]


def no_copy_on_write(base: Any) -> Fault:
    class NoCopyOnWrite(base):
        def _shared(self, *_: Any) -> list[int]:
            return []

    return NoCopyOnWrite


def copy_not_asked_for(base: Any) -> Fault:
    class CopyNotAskedFor(base):
        def allocate(self, *args: Any) -> Grant | None:
            grant: Grant | None = super().allocate(*args)
            return grant and grant._replace(copies=[])

    return CopyNotAskedFor


def fork_without_counting(base: Any) -> Fault:
    class ForkWithoutCounting(base):
        def _hold(self, holder: BlockTable | Pin) -> None:
            if isinstance(holder, Pin):
                super()._hold(holder)

    return ForkWithoutCounting


def pin_without_counting(base: Any) -> Fault:
    class PinWithoutCounting(base):
        def _hold(self, holder: BlockTable | Pin) -> None:
            if isinstance(holder, BlockTable):
                super()._hold(holder)

        def _drop(self, holder: BlockTable | Pin) -> None:
            if isinstance(holder, BlockTable):
                super()._drop(holder)

    return PinWithoutCounting


def release_frees_twice(base: Any) -> Fault:
    class ReleaseFreesTwice(base):
        def release(self, pin: Pin) -> None:
            super().release(pin)
            self._drop(pin)

    return ReleaseFreesTwice


def commit_to_shared_block(base: Any) -> Fault:
    class CommitToSharedBlock(base):
        def _check_commit(self, table: BlockTable, *args: Any) -> None:
            counts, self._ref_cnt = self._ref_cnt, [1] * self.num_blocks
            try:
                super()._check_commit(table, *args)
            finally:
                self._ref_cnt = counts

    return CommitToSharedBlock


def commit_many_commits_the_sampled_token(base: Any) -> Fault:
    class CommitManyCommitsTheSampledToken(base):
        def commit_many(self, tables: Any, seqs: Any, token_ids: Any) -> None:
            super().commit_many(tables, seqs, token_ids)
            for table, seq in zip(tables, seqs, strict=True):
                self.commit(table, seq, min(table.num_tokens, seq.num_tokens))

    return CommitManyCommitsTheSampledToken


def commit_many_checks_as_it_goes(base: Any) -> Fault:
    class CommitManyChecksAsItGoes(base):
        def commit_many(self, tables: Any, seqs: Any, token_ids: Any) -> None:
            self._check_many(tables, seqs)
            self._check_many(seqs, token_ids)
            for table, seq, token in zip(tables, seqs, token_ids, strict=True):
                seq.append([token])
                self.commit(table, seq, table.num_computed_tokens + 1)

    return CommitManyChecksAsItGoes


def allocate_many_goes_on_after_a_refusal(base: Any) -> Fault:
    class AllocateManyGoesOnAfterARefusal(base):
        def allocate_many(self, tables: Any, num_tokens: Any) -> list[Grant | None]:
            pairs = zip(tables, num_tokens, strict=True)
            return [self.allocate(table, room) for table, room in pairs]

    return AllocateManyGoesOnAfterARefusal


def reset_is_not_told(base: Any) -> Fault:
    class ResetIsNotTold(base):
        def reset(self) -> bool:
            events = self._events.copy()
            done: bool = super().reset()
            self._events = events
            return done

    return ResetIsNotTold
