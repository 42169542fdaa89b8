"""What a CUDA kernel may need of the GPU; kept beside each kernel and asserted by the tests."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KernelLimits"]


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
    """

    registers: int
    spills: int = 0
    static_smem: int = 49152
    dynamic_smem: int = 0
