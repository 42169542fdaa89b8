"""A small count of the fuzzer; `python -m tests.fuzz_partition` runs the large ones."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz_partition import check, public_functions, results, same
from tests.fuzz_upstream import upstream_counts
from tests.random_graphs import random_inputs, random_module


@pytest.mark.parametrize("start", range(0, 100, 25))
def test_random_graphs(start: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(start, start + 25):
        check(seed, counts)
    assert counts["outlined"] > 25 and counts["canonicalized"] > 15


# A tuple of all results of a region; sizes that leave one region and enter the next.
@pytest.mark.parametrize("seed", [11787, 13571, 13834])
def test_graphs_that_failed_once(seed: int) -> None:
    check(seed, Counter())


@pytest.mark.slow
def test_many_random_graphs_and_the_virtual_machine() -> None:
    counts: Counter[str] = Counter()
    for seed in range(1000, 4000):
        check(seed, counts, seed % 250 == 0)
    assert counts["executed by TVM"] > 5


@pytest.mark.slow
def test_upstream_counts() -> None:
    counts = upstream_counts(0, 60)
    assert set(counts) == {
        "CanonicalizeBindings",
        "FuseOpsByPattern",
        "MergeCompositeFunctions",
        "CombineParallelMatmul",
    }
    assert all(sum(c.values()) == 60 for c in counts.values())


def test_the_interpreter_sees_a_changed_result() -> None:
    """The check can fail: another module of the same signature gives something else."""
    mod, other = random_module(3), random_module(4)
    name = public_functions(mod)[0]
    inputs = {name: random_inputs(mod[name], 0)}
    again = {name: random_inputs(mod[name], 1)}
    assert same(results(mod, inputs), results(mod, inputs))
    assert not same(results(mod, inputs), results(mod, again))
    assert public_functions(other)
