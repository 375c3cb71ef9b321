"""Faults put into the twins on purpose: the random traffic must catch each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from faults import COMPARED, TWINS, WRONG_ANSWERS, Fault
from lockstep import Divergence, LockStep, Setting
from prefixkv.errors import CacheError

NUM_OPERATIONS = 300
NUM_SEEDS = 30


def run_alone(fault: Fault, seed: int) -> None:
    """With the shadow and the books only."""
    LockStep([fault], Setting.of(seed), seed).run(NUM_OPERATIONS)


def run_compared(fault: Fault, seed: int) -> None:
    """With the comparison only."""
    right = next(twin for twin in TWINS if issubclass(fault, twin))
    LockStep([fault, right], Setting.of(seed), seed, shadow=False).run(NUM_OPERATIONS)


def catches(run: Callable[..., None], fault: Fault) -> bool:
    for seed in range(NUM_SEEDS):
        try:
            run(fault, seed)
        except (Divergence, CacheError, LookupError):  # some break their own structures
            return True
    return False


@pytest.mark.parametrize("fault", COMPARED + WRONG_ANSWERS)
def test_the_comparison_catches(fault: Fault) -> None:
    assert catches(run_compared, fault)


@pytest.mark.parametrize("fault", WRONG_ANSWERS)
def test_the_shadow_and_the_books_catch(fault: Fault) -> None:
    assert catches(run_alone, fault)


@pytest.mark.parametrize("right", TWINS)
@pytest.mark.parametrize("run", [run_compared, run_alone])
def test_nothing_is_caught_without_a_fault(run: Callable[..., None], right: Fault) -> None:
    assert not catches(run, right)
