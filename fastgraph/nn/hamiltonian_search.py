"""Searches for Hamiltonian paths: by rotations and extensions, and exact ones of few nodes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastgraph.nn.adjacency import Adjacency, Integers

EXACT_NODES = 26
"""Graphs of so many nodes are searched exactly, in 256 MiB."""

STEP = 128
"""The cost of a step of a search, in nodes, beside those that it moves."""


class Draws:
    """Numbers by chance that any version of any library draws alike: the hash of a counter.

    By SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014).
    """

    def __init__(self) -> None:
        self.drawn = 0

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next so many numbers of 64 bits."""
        first, self.drawn = self.drawn, self.drawn + count
        z = np.arange(first + 1, self.drawn + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    def below(self, bound: int) -> int:
        """A number from 0 to below ``bound``, each as likely but for one in 2^64."""
        return int(self.words(1)[0]) * bound >> 64

    def one_of(self, values: Integers) -> int:
        """One of the values."""
        return int(values[self.below(len(values))])

    def shuffled(self, values: Integers) -> Integers:
        """The values in another order."""
        return values[self.words(len(values)).argsort(kind="stable")]


def path_by_rotations(adjacency: Adjacency, budget: int) -> Integers | None:
    """A Hamiltonian path, or ``None`` if none is found until ``budget`` nodes were touched.

    The same for the same graph and budget on any machine.
    """
    search = _Search(adjacency, budget)
    start: int | None = int((adjacency.along.degrees + adjacency.against.degrees).argmin())
    while search.left >= 0:
        search.begin(start)
        if search.succeeds():
            return search.path[::-1].copy() if search.is_turned else search.path
        start = None
    return None


class _Search:
    """A path that grows at its ends, and is rearranged where it cannot (Posa, 1976).

    In a symmetric graph an edge from the last node to one on the path reverses what follows that
    (rotation). In a directed one, where parts cannot be reversed, such an edge closes a cycle,
    which is entered elsewhere (Angluin and Valiant, JCSS 1979); where none is, the search goes on
    at the other end, against the edges.
    """

    path: Integers
    place: Integers
    ahead: Integers
    behind: Integers
    is_turned: bool

    def __init__(self, adjacency: Adjacency, budget: int) -> None:
        self.graph, self.left = adjacency, budget
        self.draw = Draws()

    def begin(self, start: int | None) -> None:
        """Begin a path with one node, ``start`` or any."""
        nodes = self.graph.num_nodes
        start = self.draw.below(nodes) if start is None else start
        self.along, self.against, self.is_turned = self.graph.along, self.graph.against, False
        # How many neighbours of each node are not on the path.
        self.ahead, self.behind = self.along.degrees.copy(), self.against.degrees.copy()
        self.place = np.full(nodes, -1)
        self.left -= nodes
        self._note(start)
        self._set(np.array([start]), 0)

    def succeeds(self) -> bool:
        """Search, and return True if ``path`` has all nodes."""
        while len(self.path) < self.graph.num_nodes:
            if self.left < 0:
                return False
            self.left -= STEP
            if self.ahead[self.path[-1]]:
                self._grow()
            elif self.behind[self.path[0]]:
                self._grow_before()
            elif not (self._opened_cycle() or self._rearranged()):
                self._turn()
                if not self._rearranged():
                    return False
        return True

    def _turn(self) -> None:
        """Let the path run against all edges."""
        self.along, self.against = self.against, self.along
        self.ahead, self.behind = self.behind, self.ahead
        self.is_turned = not self.is_turned
        self._set(self.path[::-1].copy(), 0)

    def _note(self, node: int) -> None:
        self.ahead[self.against.of(node)] -= 1
        self.behind[self.along.of(node)] -= 1

    def _grow(self) -> None:
        """Take nodes behind the last one, those with fewest ways on first (Warnsdorff's rule)."""
        added: list[int] = []
        length, last = len(self.path), int(self.path[-1])
        while self.ahead[last]:
            near = self.along.of(last)
            near = near[self.place[near] < 0]
            last = int(near[self.ahead[near].argmin()])
            self.place[last] = length + len(added)
            added.append(last)
            self._note(last)
            self.left -= STEP
        self._set(np.append(self.path, added), len(self.path))

    def _grow_before(self) -> None:
        near = self.against.of(int(self.path[0]))
        near = near[self.place[near] < 0]
        first = int(near[self.behind[near].argmin()])
        self._note(first)
        self._set(np.insert(self.path, 0, first), 0)

    def _opened_cycle(self) -> bool:
        """If the ends are joined, open the cycle behind a node from which an edge leads away."""
        if self.path[0] not in self.along.of(int(self.path[-1])):
            return False
        ways_on = np.flatnonzero(self.ahead[self.path])
        if not len(ways_on):
            return False
        self._set(np.roll(self.path, -1 - self.draw.one_of(ways_on)), 0)
        return True

    def _rearranged(self) -> bool:
        """Give the path another last node, if possible one with a way on."""
        near = self.place[self.along.of(int(self.path[-1]))]
        if self.graph.is_symmetric:
            near = near[near < len(self.path) - 2]
            if not len(near):
                return False
            kept = self._chosen(near, self.path[near + 1]) + 1
            self._set(np.concatenate([self.path[:kept], self.path[kept:][::-1]]), kept)
            return True
        found: tuple[int, int] | None = None
        for kept in self.draw.shuffled(near[near > 0]).tolist():
            entries = self.place[self.along.of(int(self.path[kept - 1]))]
            entries = entries[entries > kept]
            if len(entries):
                found = kept, self._chosen(entries, self.path[entries - 1])
                if self.ahead[self.path[found[1] - 1]]:
                    break
        if found is None:
            return False
        kept, entry = found
        parts = self.path[:kept], self.path[entry:], self.path[kept:entry]
        self._set(np.concatenate(parts), kept)
        return True

    def _chosen(self, places: Integers, last: Integers) -> int:
        """One of the places, by chance, with a way on from its last node where there is any."""
        ways_on = self.ahead[last] > 0
        return self.draw.one_of(places[ways_on] if ways_on.any() else places)

    def _set(self, path: Integers, first: int) -> None:
        """Take another path, which is the same before ``first``."""
        self.path = path
        self.place[path[first:]] = np.arange(first, len(path))
        self.left -= len(path) - first


def exact_cost(nodes: int) -> int:
    """Words of 64 bits that :func:`exact_path` has for the sets of so many nodes."""
    return (1 << nodes) // 2


def exact_path(adjacency: Adjacency) -> Integers | None:
    """A Hamiltonian path of at most ``EXACT_NODES`` nodes, or ``None`` if there is none.

    By the nodes at which paths through each set of nodes may end (Held and Karp, 1962), set by set
    in the order of their sizes, and those alone through which a path leads: 4 bytes for each of the
    ``2^nodes`` sets.
    """
    nodes = adjacency.num_nodes
    before = [_bits(adjacency.against.of(node)) for node in range(nodes)]
    ends: npt.NDArray[np.uint32] = np.zeros(1 << nodes, dtype=np.uint32)
    sets = np.left_shift(1, np.arange(nodes, dtype=np.int32), dtype=np.int32)
    ends[sets] = sets
    for _ in range(nodes - 1):
        at, larger = ends[sets], []
        for node, near in enumerate(before):
            leads = ((at & np.uint32(near)) != 0) & (sets >> node & 1 == 0)
            found = sets[leads] | np.int32(1 << node)
            known = ends[found]
            larger.append(found[known == 0])
            ends[found] = known | np.uint32(1 << node)
        sets = np.concatenate(larger)
    if not len(sets):
        return None
    left, path, allowed = (1 << nodes) - 1, [], (1 << nodes) - 1
    while left:
        last = (int(ends[left]) & allowed).bit_length() - 1
        path.append(last)
        left, allowed = left & ~(1 << last), before[last]
    return np.array(path[::-1], dtype=np.int64)


def _bits(nodes: Integers) -> int:
    return sum(1 << int(node) for node in nodes)
