"""The scheduler over a real cache manager, with a stand-in for the forward pass: no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prefixkv.cache import make_cache
from prefixkv.config import SchedulerConfig
from prefixkv.engine.request_state import RequestState
from prefixkv.engine.scheduler import Scheduler
from prefixkv.engine.step import Step
from prefixkv.request import SamplingParams


class Server:
    """A scheduler whose every forward pass yields token 7."""

    def __init__(
        self, system: str = "hash", *, num_blocks: int = 64, block_size: int = 4, **config: int
    ) -> None:
        self.cache = make_cache(system, num_blocks=num_blocks, block_size=block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(block_size=block_size, max_model_len=10_000, **config),
            self.cache,
            prefix_cache=system,
        )
        self.arrivals = 0

    def add(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 1,
        salt: str | None = None,
        prompt_logprobs: int | None = None,
    ) -> RequestState:
        request = RequestState(
            f"r{self.arrivals}",
            prompt,
            SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
            self.cache.sequence(prompt, cache_salt=salt),
            arrival=self.arrivals,
            max_tokens=max_tokens,
        )
        self.arrivals += 1
        self.scheduler.add(request)
        return request

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.update(step, [[7] * len(work.due) for work in step.work])
        for work in step.work:
            for sequence in work.due:
                if len(sequence.output_token_ids) >= work.request.max_tokens:
                    self.scheduler.finish_sequence(work.request, sequence, "length")
        self.cache.check()
        return step

    def run(self, steps: int = 1000) -> int:
        """Step until nothing is left; the number of tokens computed meanwhile."""
        before = self.scheduler.stats.computed_tokens
        for _ in range(steps):
            if not self.scheduler.has_work:
                return self.scheduler.stats.computed_tokens - before
            self.step()
        raise AssertionError("the requests never end")


def spans(step: Step) -> list[tuple[str, int, int]]:
    return [(work.request.request_id, work.start, work.stop) for work in step.work]


def test_importing_the_scheduler_does_not_import_torch() -> None:
    code = "import sys, prefixkv.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    server = Server(token_budget=10)
    server.add(list(range(25)))
    assert [spans(server.step()) for _ in range(3)] == [
        [("r0", 0, 10)],
        [("r0", 10, 20)],
        [("r0", 20, 25)],
    ]


def test_a_running_request_keeps_its_turn_beside_a_new_prompt() -> None:
    server = Server(token_budget=10)
    server.add([1, 2, 3], max_tokens=5)
    server.step()
    server.add(list(range(100, 130)))
    assert spans(server.step()) == [("r0", 3, 4), ("r1", 0, 9)]


def test_of_14_tokens_that_share_10_with_a_cached_request_8_hit_and_6_are_computed() -> None:
    server = Server()
    server.add(list(range(14)))
    server.run()
    request = server.add([*range(10), 50, 51, 52, 53])
    assert spans(server.step()) == [("r1", 8, 14)]
    assert request.num_cached_tokens == 8


def test_the_same_prompt_again_hits_all_but_the_block_of_its_last_token() -> None:
    server = Server()
    server.add(list(range(16)))
    server.run()
    assert server.add(list(range(16))).num_cached_tokens == 0
    assert spans(server.step()) == [("r1", 12, 16)]


@pytest.mark.parametrize("system", ["hash", "radix"])
def test_equal_documents_that_arrive_together_are_computed_once(system: str) -> None:
    server = Server(system, token_budget=16, num_blocks=256)
    document = list(range(100))
    for tail in range(4):
        server.add([*document, 1000 + tail, 2000 + tail], max_tokens=3)
    tokens_after_prompt = 4 * 2
    assert server.run() == len(document) + 4 * 2 + tokens_after_prompt


@pytest.mark.parametrize("system", ["paged", "off"])
def test_nobody_waits_where_a_commit_makes_nothing_findable(system: str) -> None:
    server = Server(system, token_budget=64, num_blocks=256)
    for _ in range(2):
        server.add(list(range(20)))
    assert spans(server.step()) == [("r0", 0, 20), ("r1", 0, 20)]


@pytest.mark.parametrize("gap", [1, 2, 5])
def test_equal_documents_that_arrive_a_chunk_or_more_apart_are_computed_once(gap: int) -> None:
    server = Server(token_budget=16, num_blocks=256)
    document = list(range(100))
    for tail in range(4):
        server.add([*document, 1000 + tail, 2000 + tail])
        for _ in range(gap):
            server.step()
    server.run()
    assert server.scheduler.stats.computed_tokens == len(document) + 4 * 2


def test_when_the_one_they_wait_for_is_aborted_the_others_still_end() -> None:
    server = Server(token_budget=16, num_blocks=256)
    document = list(range(100))
    first, *others = [server.add([*document, 1000 + tail, 2000 + tail]) for tail in range(4)]
    for _ in range(3):
        server.step()
    server.scheduler.finish(first, "abort")
    server.run()
    assert [request.sequences[0].finish_reason for request in others] == ["length"] * 3
    # 48 tokens were computed and stay cached; one of the others computed the rest.
    assert server.scheduler.stats.computed_tokens == len(document) + 3 * 2


def test_a_request_with_another_salt_does_not_wait_and_shares_nothing() -> None:
    server = Server(token_budget=64, num_blocks=256)
    server.add(list(range(30)), salt="a")
    server.add(list(range(30)), salt="b")
    assert spans(server.step()) == [("r0", 0, 30), ("r1", 0, 30)]


def test_a_held_request_lets_others_pass() -> None:
    server = Server(token_budget=16)
    server.add(list(range(40)))
    server.add([*range(36), 99])
    server.add([500, 501])
    server.step()
    assert spans(server.step()) == [("r0", 16, 32)]
    assert spans(server.step()) == [("r0", 32, 40), ("r2", 0, 2)]
    assert spans(server.step()) == [("r1", 36, 37)]


@pytest.mark.parametrize(("bound", "expected"), [(1, []), (0, [("r1", 0, 6)])])
def test_waiting_for_another_request_is_bounded(bound: int, expected: list[object]) -> None:
    server = Server(token_budget=16, max_hold_steps=bound)
    server.add(list(range(10)))
    server.add(list(range(10)))
    assert spans(server.step())[1:] == expected


def test_with_an_empty_pool_the_youngest_is_preempted_and_comes_back() -> None:
    server = Server(num_blocks=8, block_size=4)
    old = server.add(list(range(15)), max_tokens=10)
    young = server.add(list(range(100, 114)), max_tokens=10)
    server.run()
    assert (old.metrics.num_preemptions, old.sequences[0].finish_reason) == (0, "length")
    assert young.metrics.num_preemptions >= 1
    assert len(young.sequences[0].output_token_ids) == 10
    assert server.cache.num_free_blocks == 8


def test_many_requests_in_a_pool_for_one_all_end_in_order() -> None:
    server = Server(num_blocks=6, block_size=4)
    requests = [server.add([10 * i + j for j in range(12)], max_tokens=8) for i in range(9)]
    server.run()
    ends = [request.arrival_time + (request.metrics.total or 0) for request in requests]
    assert ends == sorted(ends)
    assert server.cache.num_free_blocks == 6


def test_at_most_max_num_seqs_run_at_once() -> None:
    server = Server(max_num_seqs=2)
    for i in range(5):
        server.add([i, i + 1, i + 2], max_tokens=4)
    server.step()
    assert (server.scheduler.num_running, server.scheduler.num_waiting) == (2, 3)


def test_prompt_logprobs_need_every_logit_so_the_request_takes_no_hit() -> None:
    server = Server()
    server.add(list(range(14)))
    server.run()
    server.add(list(range(14)), prompt_logprobs=0)
    assert [(work.start, work.stop, work.num_logits) for work in server.step().work] == [
        (0, 14, 14)
    ]
