"""Which tokens the next step computes.

There is no prefill phase and no decode phase. A branch of a request knows ``num_tokens`` tokens and
has K/V for ``num_computed_tokens`` of them; a step lets the second catch up with the first, within
a budget of tokens. Chunked prefill is a long prompt that needs several steps, a prefix hit starts
further on, and preemption is ``free``: the request comes back later and usually finds its blocks
cached. Samples of a prompt are one branch, which parts where they do: the prompt is computed once,
at first and after a preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from prefixkv.cache import BlockTable, CacheManager, Grant, Hit
from prefixkv.cache import Sequence as TokenSequence
from prefixkv.config import SchedulerConfig, blocks_for
from prefixkv.engine.request_state import Branch, RequestState, SequenceState
from prefixkv.engine.step import Step, Work
from prefixkv.request import FinishReason


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    prefix_queries: int = 0  # prompt tokens of admitted requests that looked for a prefix
    prefix_hits: int = 0  # of those, tokens that came from the cache
    prompt_tokens: int = 0  # of admitted requests, each counted once
    computed_tokens: int = 0
    generation_tokens: int = 0  # of all samples, and of all beams
    num_preemptions: int = 0


class Scheduler:
    """First come, first served, over one cache manager.

    Running requests go before waiting ones and older before younger. When the pool is empty the
    youngest running request is preempted, all its sequences together, so the oldest always gets on:
    nothing starves. Where one alone has not the room for all its samples, the last of them are put
    off until the others have ended. A waiting request is passed over while another computes a
    prefix that it shares, for ``max_hold_steps`` steps at most.

    The only writer of ``RequestState``; in an engine, the only caller of the cache manager besides
    ``Reservations``.

    Args:
        prefix_cache: the cache's system.
    """

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, *, prefix_cache: str = "hash"
    ) -> None:
        self.config = config
        self.cache = cache
        self.stats = SchedulerStats()
        self._looks_up = prefix_cache != "off"
        # Where a commit makes nothing findable, there is nothing to wait for.
        self._holds_back = prefix_cache in ("hash", "radix")
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []  # oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Sequence[RequestState]:
        """Requests that hold blocks, the oldest first."""
        return tuple(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: RequestState) -> None:
        """Queue a request, of which one sequence, or all beams, fit the pool when it is alone."""
        self._start_with(request, request.live())
        self._waiting.append(request)

    def schedule(self) -> Step:
        """The next step; its blocks are allocated. Empty when there is nothing to do."""
        step = Step()
        budget = self.config.token_budget
        preempted = self.stats.num_preemptions
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            if request.may_part:
                self._part(request)
            taken = self._grow(request, budget, step)
            if taken is not None:
                budget -= taken
                index += 1
        if self._waiting and self.stats.num_preemptions == preempted:
            self._admit(budget, step)
        return step

    def update(self, step: Step, tokens: Sequence[Sequence[int]]) -> None:
        """Take the step's results: its K/V is written, and these tokens were chosen.

        Args:
            tokens: for each work one token for each sequence that is due, or none at all: beams
                get theirs with ``continue_beams``. Work of what has ended meanwhile is dropped.
        """
        for work, chosen in zip(step.work, tokens, strict=True):
            branch = work.branch
            if branch.table is not work.table:
                continue
            self.stats.computed_tokens += work.stop - work.start
            self.cache.commit(work.table, branch.seq, work.stop)
            if not chosen:
                continue
            for sequence, token in zip(work.due, chosen, strict=True):
                if sequence.finish_reason is None:
                    self._append(work.request, sequence, token)
            if len(branch.sequences) == 1:  # known to its end; several part here first
                branch.num_tokens = work.stop + 1

    def continue_beams(
        self, request: RequestState, choices: Sequence[tuple[SequenceState, int]]
    ) -> list[SequenceState]:
        """Go on with these continuations, each a beam and its next token.

        A beam that is chosen several times is forked, one that is not is dropped.

        Returns:
            The new beams, in the order of the choices.
        """
        children: dict[SequenceState, list[SequenceState]] = {}
        beams = []
        for parent, _ in choices:
            of_parent = children.setdefault(parent, [])
            beams.append(parent.fork() if of_parent else parent)
            of_parent.append(beams[-1])
        for beam, (_, token) in zip(beams, choices, strict=True):
            self._append(request, beam, token)
        request.sequences = beams
        for branch in tuple(request.branches):
            branch.sequences = [
                child for parent in branch.sequences for child in children.get(parent, ())
            ]
            if branch.sequences:
                branch.compare()
            else:
                request.branches.remove(branch)
                self._free(branch)
        return beams

    def finish(
        self, request: RequestState, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """End a request wherever it is and give its blocks back; what has ended stays as it is."""
        for sequence in (*request.live(), *request.put_off):
            sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if not request.ended:
            request.put_off = []
            self._leave(request)

    def finish_sequence(
        self,
        request: RequestState,
        sequence: SequenceState,
        reason: FinishReason,
        stop_reason: str | int | None = None,
    ) -> None:
        """End one of a request's sequences, and the request with the last of them."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence in request.put_off:
            request.put_off.remove(sequence)
            return
        branch = next(each for each in request.branches if sequence in each.sequences)
        if len(branch.sequences) > 1:
            branch.sequences.remove(sequence)
            branch.compare()
        elif len(request.branches) > 1:
            request.branches.remove(branch)
            self._free(branch)
        else:
            self._leave(request)

    def _leave(self, request: RequestState) -> None:
        """The running sequences of a request have ended."""
        was_waiting = request.waits
        (self._waiting if was_waiting else self._running).remove(request)
        self._free_all(request)
        if not request.put_off:
            request.metrics.total = request.elapsed()
            return
        self._start_with(request, request.put_off)
        self._waiting.appendleft(request)

    def _start_with(self, request: RequestState, sequences: list[SequenceState]) -> None:
        """Let as many as may run at once be the request's one branch, and put off the others."""
        most = self.config.max_num_seqs
        request.branches = [Branch(sequences[:most])]
        request.put_off = sequences[most:]

    def _grow(self, request: RequestState, budget: int, step: Step) -> int | None:
        """Give a running request its part of the step, at the cost of younger ones if need be.

        Returns:
            Tokens taken from the budget; None when the request was the youngest and had to go.
        """
        work, copies, left = [], [], budget
        for branch in request.branches:
            start = branch.num_computed_tokens
            stop = min(branch.num_tokens, start + left)
            if start == stop:  # a beam that waits for the others, or the budget is spent
                continue
            grant = self._make_room(branch, stop)
            if grant is None and request.waits:
                return None
            if grant is None:  # the branch was put off, the last of them
                break
            copies += grant.copies
            work.append(self._work(request, branch, start, stop))
            left -= stop - start
        step.copies += copies
        step.work += work
        return budget - left

    def _make_room(self, branch: Branch, stop: int) -> Grant | None:
        """Blocks for a branch; None if it had to give up its own before there were enough."""
        while branch.table is not None:
            grant = self.cache.allocate(branch.table, stop)
            if grant is not None:
                return grant
            victim = self._running[-1]
            if victim is not self._running[0] or not self._put_off(victim):
                self._preempt(victim)
        return None

    def _part(self, request: RequestState) -> None:
        """Give each sequence of a branch a branch of its own, where they no longer agree."""
        branches = []
        for branch in request.branches:
            table, computed = branch.table, branch.num_computed_tokens
            if len(branch.sequences) == 1 or computed < branch.num_tokens or branch.due():
                branches.append(branch)
                continue
            assert table is not None  # running branches hold one
            at = computed - request.num_prompt_tokens
            children: dict[int, list[SequenceState]] = {}
            for sequence in branch.sequences:
                children.setdefault(sequence.output_token_ids[at], []).append(sequence)
            parted = [Branch(sequences) for sequences in children.values()]
            for child in parted[1:]:
                child.table = self._longer(request, child, table) or self.cache.fork(table)
            parted[0].table = self._longer(request, parted[0], table)
            if parted[0].table is None:
                parted[0].table = table
            else:
                self.cache.free(table)
            branch.table = None
            branches += parted
        request.branches = branches

    def _longer(
        self, request: RequestState, branch: Branch, table: BlockTable
    ) -> BlockTable | None:
        """A table that goes on where ``table`` ends, with what is still cached from before."""
        block_size, computed = self.config.block_size, table.num_computed_tokens
        if not self._looks_up or (branch.num_tokens - 1) // block_size * block_size <= computed:
            return None
        hit = self.cache.lookup(self._known(request, branch))
        full = computed // block_size
        # Where the hit has other blocks of the same content, taking it would hold both.
        if hit.num_tokens <= computed or hit.blocks[:full] != table.blocks[:full]:
            return None
        longer = self.cache.table()
        self.cache.allocate(longer, hit.num_tokens, hit)  # it needs no new blocks
        return longer

    def _known(self, request: RequestState, branch: Branch) -> TokenSequence:
        """What the branch's sequences have in common, as a sequence."""
        if branch.num_tokens == branch.seq.num_tokens:
            return branch.seq
        tokens = request.prompt + branch.sequences[0].output_token_ids
        return self.cache.sequence(tokens[: branch.num_tokens], cache_salt=request.cache_salt)

    def _admit(self, budget: int, step: Step) -> None:
        room = self.config.max_num_seqs - sum(request.num_seqs for request in self._running)
        for request in tuple(self._waiting):
            if budget <= 0 or request.num_seqs > room:
                return
            (branch,) = request.branches
            hit = self._lookup(request, branch)
            if hit is not None and self._is_held(branch, hit, request.held_steps):
                request.held_steps += 1
                continue
            if self._running and not self._all_fit(branch, hit):
                return
            start = 0 if hit is None else hit.num_tokens
            stop = min(branch.num_tokens, start + budget)
            table = self.cache.table()
            grant = self.cache.allocate(table, stop, hit)
            if grant is None:
                self.cache.free(table)
                return
            branch.table = table
            self._waiting.remove(request)
            self._start(request, hit)
            step.copies += grant.copies
            step.work.append(self._work(request, branch, start, stop))
            budget -= stop - start
            room -= request.num_seqs

    def _all_fit(self, branch: Branch, hit: Hit | None) -> bool:
        """Whether there is room for all sequences as they are now, so that none soon has to go.

        One sequence is not asked: it goes on as far as it comes.
        """
        if len(branch.sequences) == 1:
            return True
        block_size = self.config.block_size
        shared = branch.num_tokens // block_size
        own = (blocks_for(each.num_tokens, block_size) - shared for each in branch.sequences)
        held = sum(self.cache.block(each).ref_cnt > 0 for each in (hit.blocks if hit else ()))
        return shared + sum(own) - held <= self.cache.num_free_blocks

    def _lookup(self, request: RequestState, branch: Branch) -> Hit | None:
        # Logits of cached tokens do not exist, so a request that wants them computes them all.
        if not self._looks_up or request.wants_prompt_logprobs:
            return None
        return self.cache.lookup(self._known(request, branch))

    def _is_held(self, branch: Branch, hit: Hit, held_steps: int) -> bool:
        """Whether a running request is computing blocks that this one would compute again."""
        if not self._holds_back or held_steps >= self.config.max_hold_steps:
            return False
        block_size = self.config.block_size
        most = (branch.num_tokens - 1) // block_size * block_size
        if most <= hit.num_tokens:
            return False
        for other in (each for running in self._running for each in running.branches):
            shared = min(branch.seq.shared_prefix(other.seq), other.num_tokens, most)
            shared -= shared % block_size
            if shared > hit.num_tokens and other.num_computed_tokens < shared:
                return True
        return False

    def _start(self, request: RequestState, hit: Hit | None) -> None:
        self._running.append(request)
        # A preempted request comes back older than some that run now.
        if len(self._running) > 1 and self._running[-2].arrival > request.arrival:
            self._running.sort(key=lambda running: running.arrival)
        if request.metrics.queue is not None:
            return
        request.metrics.queue = request.elapsed()
        self.stats.prompt_tokens += request.num_prompt_tokens
        if hit is not None:
            request.num_cached_tokens = hit.num_tokens
            self.stats.prefix_queries += request.num_prompt_tokens
            self.stats.prefix_hits += hit.num_tokens

    def _work(self, request: RequestState, branch: Branch, start: int, stop: int) -> Work:
        assert branch.table is not None  # it has just been given room
        due: Sequence[SequenceState] = ()
        if stop == branch.num_tokens and not request.reserves:
            due = branch.due()
        num_logits = 1 if due else 0
        if request.wants_prompt_logprobs and not branch.sequences[0].output_token_ids:
            num_logits = stop - start
        return Work(request, branch, branch.table, start, stop, num_logits, due)

    def _preempt(self, request: RequestState) -> None:
        self._running.remove(request)
        sequences = request.live()
        self._free_all(request)
        request.branches = [Branch(sequences)]
        self._waiting.appendleft(request)
        self._count_preemption(request)

    def _put_off(self, request: RequestState) -> bool:
        """Take its blocks from the last branch of a request, until all others have ended."""
        if request.width or len(request.branches) == 1:
            return False
        branch = request.branches.pop()
        self._free(branch)
        request.put_off = branch.sequences + request.put_off
        self._count_preemption(request)
        return True

    def _count_preemption(self, request: RequestState) -> None:
        request.metrics.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _free_all(self, request: RequestState) -> None:
        """Free a request's branches, the first last: what they share goes last."""
        for branch in reversed(request.branches):
            self._free(branch)
        request.branches = []

    def _free(self, branch: Branch) -> None:
        if branch.table is not None:
            self.cache.free(branch.table)
            branch.table = None

    def _append(self, request: RequestState, sequence: SequenceState, token: int) -> None:
        if request.metrics.time_to_first_token is None:
            request.metrics.time_to_first_token = request.elapsed()
        sequence.append(token)
        self.stats.generation_tokens += 1
