"""Contraction against brute force: reachability computed afresh for every group."""

from __future__ import annotations

import random

import pytest

from relax_llm_passes.convexity import Contraction


def random_dag(rng: random.Random, nodes: int, density: float) -> list[list[int]]:
    return [[j for j in range(i + 1, nodes) if rng.random() < density] for i in range(nodes)]


def quotient_is_acyclic(succ: list[list[int]], groups: list[set[int]]) -> bool:
    rep = {n: i for i, group in enumerate(groups) for n in group}
    label = {n: ("group", rep[n]) if n in rep else ("node", n) for n in range(len(succ))}
    edges: dict[tuple, set[tuple]] = {v: set() for v in label.values()}
    degree = dict.fromkeys(edges, 0)
    for i, targets in enumerate(succ):
        for j in targets:
            if label[i] != label[j] and label[j] not in edges[label[i]]:
                edges[label[i]].add(label[j])
                degree[label[j]] += 1
    ready = [v for v, d in degree.items() if d == 0]
    seen = 0
    while ready:
        seen += 1
        for target in edges[ready.pop()]:
            degree[target] -= 1
            if degree[target] == 0:
                ready.append(target)
    return seen == len(edges)


def check_order(succ: list[list[int]], order: list[list[int]]) -> None:
    place = {n: i for i, group in enumerate(order) for n in group}
    assert sorted(place) == list(range(len(succ)))
    for i, targets in enumerate(succ):
        for j in targets:
            assert place[i] <= place[j]


@pytest.mark.parametrize("seed", range(400))
def test_agrees_with_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randrange(2, 16)
    succ = random_dag(rng, nodes, rng.choice([0.1, 0.2, 0.4]))
    contraction = Contraction(succ)
    accepted: list[set[int]] = []
    for _ in range(rng.randrange(1, 8)):
        free = [n for n in range(nodes) if contraction.is_free(n)]
        if not free:
            break
        group = set(rng.sample(free, min(len(free), rng.randrange(1, 5))))
        path = contraction.contract(group)
        expected = quotient_is_acyclic(succ, [*accepted, group])
        assert (path is None) == expected
        if path is None:
            accepted.append(group)
            assert not any(contraction.is_free(n) for n in group)
        else:
            assert path[0] in group and path[-1] in group and len(path) > 2
        check_order(succ, contraction.order())
        groups = [set(g) for g in contraction.order()]
        assert all(g in groups for g in accepted)


def test_order_is_untouched_where_nothing_has_to_move() -> None:
    succ = [[1], [3], [4], [5], [5], []]
    contraction = Contraction(succ)
    assert contraction.contract({1, 3}) is None
    assert contraction.order() == [[0], [2], [1, 3], [4], [5]]


def test_two_groups_that_close_a_cycle_only_together() -> None:
    # 0 -> 2 and 1 -> 3: {0, 3} needs 2 after it and 1 before it, {1, 2} the other way round.
    contraction = Contraction([[2], [3], [], []])
    assert contraction.contract({0, 3}) is None
    path = contraction.contract({1, 2})
    assert path is not None and {path[0], path[-1]} <= {1, 2}


def test_work_does_not_grow_with_the_program() -> None:
    """A chain of 20000 nodes with 5000 groups of neighbours: no search leaves its group."""

    class Counting(list):
        reads = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            Counting.reads += 1
            return super().__iter__()

    nodes = 20000
    contraction = Contraction([[i + 1] if i + 1 < nodes else [] for i in range(nodes)])
    contraction._succ = [Counting(s) for s in contraction._succ]
    for i in range(0, nodes, 4):
        assert contraction.contract({i, i + 1, i + 2}) is None
    assert Counting.reads <= 3 * nodes
