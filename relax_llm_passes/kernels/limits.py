"""What a CUDA kernel may need of the GPU; kept beside each kernel and asserted by the tests."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TVM_ELEMENTWISE", "TVM_TILED", "KernelLimits"]


@dataclass(frozen=True)
class KernelLimits:
    """Upper bounds, for every shape a kernel is built for and every architecture tested.

    Attributes
    ----------
    registers : int
        Per thread.
    spills : int
        Bytes of spill stores plus loads.
    static_smem, dynamic_smem : int
        Bytes of shared memory per block.
    resident_threads : int
        Least number of threads that a multiprocessor must be able to hold at once, of the 32
        blocks that it holds at most.
    """

    registers: int
    spills: int = 0
    static_smem: int = 49152
    dynamic_smem: int = 0
    resident_threads: int = 0


# Kernels that TVM fuses and its rules or dlight's schedule have no file of their own here.
# Elementwise ones and gathers are bound by memory: every thread that a multiprocessor takes.
TVM_ELEMENTWISE = KernelLimits(registers=32, static_smem=0, resident_threads=2048)
# Those that stage tiles in shared memory (products, reductions) keep a tile of results in
# registers and hide latency with independent operations too: 4 warps for each of 4 schedulers.
TVM_TILED = KernelLimits(registers=96, resident_threads=512)
