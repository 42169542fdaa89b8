"""Whether groups of nodes of a DAG can each be made one node with no cycle between them.

A group is *convex* when no path leaves it and comes back. Several groups, each convex, can still
close a cycle with each other, so what has to stay acyclic is the graph in which every accepted
group is one node. `Contraction` keeps a topological order of that graph and answers each question
exactly.

The order is maintained as in Pearce and Kelly, "A dynamic topological sort algorithm for directed
acyclic graphs" (JEA 2006): a search starts from the group's members and never leaves the stretch
of the order between the first and the last of them, and only what it finds there changes places.
Groups of neighbours therefore cost their own size, whatever the length of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Contraction"]


class Contraction:
    """A DAG in which groups of nodes become one node each.

    Parameters
    ----------
    successors : sequence of sequences of int
        The edges. Node numbers must be a topological order: every edge goes to a larger number.
    """

    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        self._succ: list[list[int]] = [list(s) for s in successors]
        self._pred: list[list[int]] = [[] for _ in self._succ]
        for node, targets in enumerate(self._succ):
            for target in targets:
                self._pred[target].append(node)
        self._rep = list(range(len(self._succ)))
        self._place = list(range(len(self._succ)))
        self._members: dict[int, list[int]] = {}

    def is_free(self, node: int) -> bool:
        """Whether no accepted group has `node`."""
        return self._rep[node] == node and node not in self._members

    def contract(self, group: Iterable[int]) -> list[int] | None:
        """Make `group` one node, if the graph stays acyclic.

        Parameters
        ----------
        group : iterable of int
            Nodes that no accepted group has.

        Returns
        -------
        list of int or None
            None when the group was accepted. Otherwise nothing changed, and the list is a path
            that leaves the group and comes back: its first and last nodes are members, the nodes
            between are not (a member of another group stands for all of that group).
        """
        members = sorted(set(group))
        inside = set(members)
        last = max(members, key=self._place.__getitem__)
        end = self._place[last]
        start = min(self._place[m] for m in members)

        came_from: dict[int, int] = {}
        stack: list[int] = []
        for member in members:
            for target in self._succ[member]:
                node = self._rep[target]
                if node not in inside and node not in came_from and self._place[node] < end:
                    came_from[node] = member
                    stack.append(node)
        while stack:
            node = stack.pop()
            for target in self._succ[node]:
                following = self._rep[target]
                if following in inside:
                    return self._path(node, target, came_from, inside)
                if following not in came_from and self._place[following] < end:
                    came_from[following] = node
                    stack.append(following)

        if came_from:
            self._move(members, inside, list(came_from), start, last)
        for member in members:
            if member != last:
                self._rep[member] = last
                self._succ[last].extend(self._succ[member])
                self._pred[last].extend(self._pred[member])
        self._members[last] = members
        return None

    def _path(self, node: int, target: int, came_from: dict[int, int], inside: set[int]) -> list:
        path = [target, node]
        while path[-1] not in inside:
            path.append(came_from[path[-1]])
        return path[::-1]

    def _move(
        self, members: list[int], inside: set[int], after: list[int], start: int, last: int
    ) -> None:
        """Reorder between the group's ends: what it needs, the group, what needs it."""
        before: dict[int, None] = {}
        stack = list(members)
        while stack:
            for source in self._pred[stack.pop()]:
                node = self._rep[source]
                if node not in inside and node not in before and self._place[node] > start:
                    before[node] = None
                    stack.append(node)
        places = sorted(self._place[n] for n in (*members, *after, *before))
        by_place = self._place.__getitem__
        for node, place in zip(sorted(before, key=by_place), places, strict=False):
            self._place[node] = place
        tail = sorted(after, key=by_place)
        for node, place in zip(reversed(tail), reversed(places), strict=False):
            self._place[node] = place
        self._place[last] = places[-len(tail) - 1]

    def order(self) -> list[list[int]]:
        """Return the nodes in a topological order: a group as one list, others as lists of one."""
        alone = [n for n in range(len(self._rep)) if self._rep[n] == n]
        alone.sort(key=self._place.__getitem__)
        return [self._members.get(n, [n]) for n in alone]
