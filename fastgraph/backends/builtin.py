"""The backends that come with fastgraph, as a plugin."""

from __future__ import annotations

from collections.abc import Sequence

from fastgraph.backends.cpu import CpuBackend
from fastgraph.backends.cuda import CudaBackend
from fastgraph.backends.dense_blocks import DenseBlocksBackend
from fastgraph.backends.generated import generated_on_gpus
from fastgraph.backends.reference import ReferenceBackend
from fastgraph.backends.scatter import ScatterBackend
from fastgraph.backends.sparse import SparseBackend
from fastgraph.plugins.backend import Backend
from fastgraph.plugins.hookspecs import hookimpl


@hookimpl
def fastgraph_backends() -> Sequence[Backend]:
    return [
        CpuBackend(),
        CudaBackend(generated=generated_on_gpus()),
        ScatterBackend(),
        SparseBackend(),
        DenseBlocksBackend(),  # before the reference, which is a last resort, too
        ReferenceBackend(),
    ]
