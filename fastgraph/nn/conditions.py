"""Conditions under which attention along edges may stand for attention of all pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastgraph.layers.arguments import check_edges, check_flags, check_integers
from fastgraph.nn.answer import Answer

BUDGET = 1 << 25
"""Default of what searches for one answer may touch: about ten seconds at most. All sets of 26
nodes take it all."""


@dataclass(frozen=True)
class Conditions:
    """The answers to C1, C2 and C3 for one pattern of attention.

    Attributes:
        self_attention: C1, every node attends to itself.
        hamiltonian_path: C2, a path along edges visits every node once.
        reachability: C3, every node reaches every other within the layers.
    """

    self_attention: Answer
    hamiltonian_path: Answer
    reachability: Answer

    @property
    def hold(self) -> bool:
        """True if all three are answered by yes."""
        answers = (self.self_attention, self.hamiltonian_path, self.reachability)
        return all(answer.verdict == "yes" for answer in answers)

    def __str__(self) -> str:
        return f"C1 {self.self_attention}\nC2 {self.hamiltonian_path}\nC3 {self.reachability}"


def conditions(
    index: Tensor,
    num_nodes: int,
    layers: int,
    *,
    token: bool = False,
    self_loops: bool = False,
    budget: int = BUDGET,
) -> Conditions:
    """Answers to the three conditions of sparse attention, each with a witness.

    They are those of TorchGT (Zhang et al., SC 2024, section III-B) after Yun et al. ("O(n)
    connections are expressive enough", NeurIPS 2020, assumption 1), for whom C2 need only hold for
    the union of the patterns of all layers. An answer is undecided where no rule applies within the
    budget, and the same on all machines.

    - C1, **every node attends to itself**. One pass. The witness of a yes is the edge that is the
      loop of each node, of a no the nodes without one, which loops would repair.
    - C2, **a Hamiltonian path**, along the directions of edges. *No*: more nodes with one neighbour
      than two, a node without any counting twice; several components; nodes without edges into or
      out of them, or strong components, of which none reaches the other; a tree of blocks that is
      no path. A token allows for two paths, and thus for four leaves. *Yes*: in patterns of which
      every edge has its opposite the theorems of Dirac, Ore and Chvatal; otherwise a path that was
      found by rotations and extensions, or with up to 26 nodes by trying all sets, and that was
      followed edge by edge. The witness of a yes is the path, or for a theorem the nodes by
      ascending degree; of a no nodes that cannot be on one path, or ``None`` where all sets were
      tried.
    - C3, **reach**: each node is at most ``layers`` edges from every other. *No*: a pair of nodes
      that is farther, or not connected, its witness. *Yes*: a token, if there are two layers; a
      node whose distances to the farthest nodes before and behind it sum to ``layers`` or less, the
      witness of either; or searches from all nodes that are not near the middle (iFUB, Crescenzi
      et al., TCS 2013), within the budget, which graphs of 4,096 nodes keep to by default.

    Edges that come several times count once, and self-loops for C1 alone.

    Args:
        index: int64 or int32 ``[2, E]``: node ``index[1, e]`` attends to node ``index[0, e]``.
        num_nodes: of the graph.
        layers: that apply the pattern, one after the other, at least 1.
        token: whether there is a global token besides, which attends to all nodes and itself and
            all nodes to it. In witnesses it is node ``num_nodes``.
        self_loops: whether every node attends to itself whatever ``index`` has.
        budget: how many nodes searches may touch for one answer; 32 words of the bitsets of C3,
            each with 64 searches, count as one. Trying all sets of n nodes, a token included, takes
            ``2^(n - 1)``, and is left out where that is more.

    Returns:
        The answers.

    Raises:
        TypeError: ``index`` is no tensor, or an option no bool.
        ValueError: ``index`` has another shape or dtype, or a number is out of its range.
        IndexError: ``index`` points outside the nodes.
    """
    check_edges(num_nodes, index=index)
    check_integers(layers=layers)
    check_integers(0, budget=budget)
    check_flags(token=token, self_loops=self_loops)
    # These need NumPy and NetworkX, which take long to import.
    from fastgraph.nn.adjacency import Adjacency
    from fastgraph.nn.hamiltonian import hamiltonian_path
    from fastgraph.nn.reachability import reachability

    source, destination = index.detach().cpu().long()
    adjacency = Adjacency(source.numpy(), destination.numpy(), num_nodes)
    return Conditions(
        _self_attention(source, destination, num_nodes, self_loops),
        hamiltonian_path(adjacency, token, budget),
        reachability(adjacency, layers, token, budget),
    )


def _self_attention(
    source: Tensor, destination: Tensor, num_nodes: int, self_loops: bool
) -> Answer:
    if self_loops:
        return Answer("yes", "loops are added", None)
    edges = (source == destination).nonzero().squeeze(1)
    loops = torch.full((num_nodes,), -1)
    loops[source[edges]] = edges
    without = (loops < 0).nonzero().squeeze(1)
    if len(without):
        return Answer("no", f"{len(without)} of {num_nodes} nodes have no self-loop", without)
    return Answer("yes", "every node has a self-loop", loops)
