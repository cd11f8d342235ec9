"""A transform that gives nodes positions by eigenvectors, for graphs of any shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import AddLaplacianEigenvectorPE, BaseTransform
from torch_geometric.utils import to_undirected

from fastgraph.layers.arguments import check_integers, check_kinds
from fastgraph.transforms.graph_of import graph_of


@functional_transform("laplacian_positions")
class LaplacianPositions(BaseTransform):  # type: ignore[misc]  # PyG has no types
    """Gives a graph the eigenvectors of its Laplacian, by PyG's ``AddLaplacianEigenvectorPE``.

    Of the graph with both directions of each edge, without the first eigenvector, float32
    ``[nodes, k]``. Where PyG's transform fails, this one has a result: graphs of ``k`` nodes and
    fewer have zeros in the channels that are left, and those of about ``k`` nodes do not ask ARPACK
    for more than it gives. The largest number of each channel is positive, and ARPACK begins with
    the same vector, so that a graph always has the same result; models draw signs in training, see
    :func:`fastgraph.nn.with_random_signs`. Where an eigenvalue comes several times, as 0 does in a
    graph of several components, any basis of its vectors may be the result.

    Args:
        k: channels, at least 1.
        attr_name: of the result.
        options: of ``scipy.sparse.linalg.eigsh``, for graphs of 100 nodes and more.

    Raises:
        TypeError: the graph is no ``Data`` of PyG, or a batch.
        ValueError: ``k`` is out of range, or the graph has no ``edge_index`` int64 or int32
            ``[2, E]``.
        IndexError: ``edge_index`` points outside the nodes.
        RuntimeError: ARPACK did not converge, which several components make likely.
    """

    def __init__(
        self, k: int, attr_name: str = "laplacian_eigenvector_pe", **options: object
    ) -> None:
        check_integers(k=k)
        check_kinds(str, attr_name=attr_name)
        self.k, self.attr_name, self.options = k, attr_name, options

    def forward(self, data: Data) -> Data:
        """The same graph with positions."""
        index, num_nodes = graph_of(data)
        positions = torch.zeros(num_nodes, self.k)
        known = min(self.k, num_nodes - 1)
        if known > 0:
            found = self._eigenvectors(index.cpu(), num_nodes, known)
            signs = found.gather(0, found.abs().argmax(0, keepdim=True)).sign()
            positions[:, :known] = found * signs
        data[self.attr_name] = positions.to(index.device)
        return data

    def _eigenvectors(self, index: Tensor, num_nodes: int, count: int) -> Tensor:
        from scipy.sparse.linalg import ArpackError

        draw = torch.Generator().manual_seed(0)
        begin = torch.randn(num_nodes, generator=draw).numpy()
        name, options = "positions", {"v0": begin} | self.options
        transform = AddLaplacianEigenvectorPE(count, name, is_undirected=True, **options)
        if count + 1 >= num_nodes:  # of which ARPACK can find all but one
            transform.SPARSE_THRESHOLD = num_nodes + 1
        both = to_undirected(index, num_nodes=num_nodes)
        try:
            found = transform(Data(edge_index=both, num_nodes=num_nodes))[name]
        except ArpackError as error:
            raise RuntimeError(
                f"ARPACK found no {count} eigenvectors of a graph of {num_nodes} nodes ({error}): "
                "other options may help, such as maxiter, ncv or tol, fewer channels, or the "
                "largest component alone"
            ) from error
        return torch.as_tensor(found).float()

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}(k={self.k}, attr_name={self.attr_name!r}{options})"
