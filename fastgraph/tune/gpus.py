"""Figures of GPUs for models: from data sheets, and as others have measured them.

None of these was measured by this project but where a comment says so. Latencies and the bandwidth
of the second cache are of microbenchmarks, which scatter by a fifth.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
USABLE = 0.8
"""Of the second cache, what random rows can use of it beside what streams through."""
BLOCK_WARPS = 4
SCHEDULERS = 4
"""Of a multiprocessor, each of which issues an instruction of a warp in a cycle."""
REGISTERS = 65_536
"""Of a multiprocessor; a warp takes them in steps of 256 (CUDA C++ programming guide)."""


@dataclass(frozen=True)
class Sheet:
    """A GPU.

    Attributes:
        name: as torch names it, or a part of that.
        architecture: whose registers are read from the table.
        multiprocessors: of the chip as it is sold.
        gigahertz: the clock that it keeps under load.
        warps: that fit on a multiprocessor.
        dram_gb_per_s: of a copy, bytes read and written.
        cache_bytes: of the second cache.
        cache_gb_per_s: of reading what stays there.
        cache_ns: from a load to its value, from there.
        dram_ns: the same from memory.
        tf32_tflops, bf16_tflops: 1e12 operations of tensor cores a second, on dense matrices.
    """

    name: str
    architecture: str
    multiprocessors: int
    gigahertz: float
    warps: int
    dram_gb_per_s: float
    cache_bytes: int
    cache_gb_per_s: float
    cache_ns: float
    dram_ns: float
    tf32_tflops: float
    bf16_tflops: float

    def hit(self, table: float, parts: int = 1) -> float:
        """The share of gathered rows that the second cache has.

        Args:
            table: bytes of all of them.
            parts: of their columns, which blocks take one after the other.
        """
        return min(1.0, USABLE * self.cache_bytes * parts / max(1.0, table))

    def moved(
        self, gathered: float, read: float, streamed: float, table: float, hit: float
    ) -> dict[str, float]:
        """Milliseconds that bytes take to move.

        Args:
            gathered: of rows of features, each time that one is gathered.
            read: by the multiprocessors, these and others.
            streamed: read from memory or written to it once.
            table: of all rows of features.
            hit: as :meth:`hit` says.
        """
        missed = max(min(table, gathered), (1 - hit) * gathered)
        return {
            "cache": read / self.cache_gb_per_s / 1e6,
            "memory": (streamed + missed) / self.dram_gb_per_s / 1e6,
        }

    def warps_at_work(self, registers: int) -> int:
        """The number of warps of a kernel that a multiprocessor holds, in whole blocks."""
        of_warp = -(-registers * WARP // 256) * 256
        fitting = min(self.warps, REGISTERS // of_warp)
        return max(1, fitting // BLOCK_WARPS) * BLOCK_WARPS


SHEETS = (
    # Of tensor cores: NVIDIA's data sheets, without sparsity, of 16 bits with sums in float32.
    # NVIDIA's data sheet of the H200: 4.8 TB/s of HBM3e, 132 multiprocessors. Measured on one: a
    # copy by torch at 4.3 TB/s, 1.98 GHz under load, 60 MB of second cache. Its bandwidth and the
    # latencies are the H100's, as chipsandcheese.com has measured that (2023-07), by the clocks.
    Sheet("H200", "sm_90", 132, 1.98, 64, 4300.0, 60 << 20, 6500.0, 140.0, 340.0, 494.0, 989.0),
    # NVIDIA's A100 whitepaper: 108 multiprocessors at 1.41 GHz, 40 MB, 2.04 TB/s of HBM2e in the
    # version of 80 GB. Of a copy, published kernels see 1.8 TB/s; the second cache reads 5120 bytes
    # a cycle on paper, and about 0.6 of that in the microbenchmarks of the same authors.
    Sheet("A100", "sm_80", 108, 1.41, 64, 1800.0, 40 << 20, 4300.0, 190.0, 400.0, 156.0, 312.0),
    # NVIDIA's Ada whitepaper: 128 multiprocessors, 72 MB, 1008 GB/s. The clock, 5 TB/s from the
    # second cache and latencies as chipsandcheese.com has measured them (2022-11); an L40, of the
    # same generation, waits 222 to 339 cycles by the multiprocessor (arXiv 2606.22588).
    Sheet("RTX 4090", "sm_89", 128, 2.6, 48, 930.0, 72 << 20, 5000.0, 120.0, 290.0, 82.6, 165.0),
)


def sheet_of(name: str) -> Sheet | None:
    """The sheet of a GPU that calls itself so, if there is one."""
    return next((sheet for sheet in SHEETS if sheet.name in name), None)
