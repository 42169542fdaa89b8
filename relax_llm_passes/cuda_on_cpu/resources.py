"""What a kernel needs of a GPU, read from ptxas' report, and what fits on a multiprocessor."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..kernels.limits import KernelLimits

__all__ = ["KernelResources", "launch_bounds", "parse_ptxas"]

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_BOUNDS = re.compile(r"__launch_bounds__\(\s*(\d+)[^)]*\)\s*(\w+)\s*\(")

# CUDA programming guide, "Compute Capabilities": the table of limits per multiprocessor.
_REGISTERS = 65536  # allocated 256 to a warp at a time: 8 per thread
_BLOCKS = {"86": 16, "87": 16, "89": 24}  # 32 elsewhere
_THREADS = {"86": 1536, "87": 1536, "89": 1536, "120": 1536, "121": 1536}  # 2048 elsewhere
_SHARED_KB = {"80": 164, "87": 164, "90": 228, "100": 228, "103": 228}  # 100 elsewhere
_RESERVED_SHARED = 1024  # by CUDA, per block


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs on one GPU, as ptxas reports it.

    Attributes
    ----------
    kernel, arch : str
        e.g. "rms_norm_kernel", "sm_90".
    registers : int
        Per thread.
    spills : int
        Bytes of spill stores plus spill loads; stack is for local arrays.
    stack : int
        Bytes of stack per thread.
    static_smem : int
        Bytes of static shared memory per block.
    dynamic_smem : int
        Bytes of dynamic shared memory per block as compiled from TIR; -1 when it is not constant or
        when only source text was given.
    threads : int
        Per block, from ``__launch_bounds__``; 0 when the source does not say.
    """

    kernel: str
    arch: str
    registers: int
    spills: int
    stack: int
    static_smem: int
    dynamic_smem: int = -1
    threads: int = 0

    @property
    def resident_threads(self) -> int:
        """Threads that a multiprocessor holds at once; 0 when the threads per block are unknown.

        By registers, shared memory, blocks and threads; unknown dynamic shared memory counts as 0.
        """
        if not self.threads:
            return 0
        sm = self.arch.partition("_")[2].rstrip("af")
        warps = -(-self.threads // 32)
        shared = self.static_smem + max(0, self.dynamic_smem) + _RESERVED_SHARED
        blocks = min(
            _REGISTERS // (max(8, -(-self.registers // 8) * 8) * 32 * warps),
            _SHARED_KB.get(sm, 100) * 1024 // shared,
            _THREADS.get(sm, 2048) // (32 * warps),
            _BLOCKS.get(sm, 32),
        )
        return blocks * self.threads

    def within(
        self,
        limits: KernelLimits | None = None,
        *,
        registers: int = 255,
        spills: int = 0,
        static_smem: int = 49152,
        dynamic_smem: int = 49152,
    ) -> str:
        """Which of these limits the kernel breaks, as text; empty when none.

        ``limits`` are those that a kernel's file states; without them the numbers count.
        """
        if limits is None:
            limits = KernelLimits(registers, spills, static_smem, dynamic_smem)
        broken = []
        for name in ("registers", "spills", "static_smem", "dynamic_smem"):
            if getattr(self, name) > getattr(limits, name):
                broken.append(f"{name} {getattr(self, name)} > {getattr(limits, name)}")
        if self.threads and self.resident_threads < min(limits.resident_threads, 32 * self.threads):
            broken.append(
                f"resident_threads {self.resident_threads} < {limits.resident_threads} "
                f"({self.registers} registers, {self.threads} threads, {self.static_smem} bytes)"
            )
        return f"{self.kernel} on {self.arch}: {', '.join(broken)}" if broken else ""


def launch_bounds(source: str) -> dict[str, int]:
    """Threads per block of every kernel in CUDA source that states them."""
    return {name: int(threads) for threads, name in _BOUNDS.findall(source)}


def parse_ptxas(
    log: str, arch: str, dynamic: dict[str, int], threads: dict[str, int]
) -> list[KernelResources]:
    """One row per kernel of what ``ptxas -v`` wrote; dynamic bytes and threads by kernel name."""
    rows = []
    name = ""
    stack = spills = 0
    for line in log.splitlines():
        m = _ENTRY.search(line)
        if m:
            name = m.group(1)
        m = _SPILLS.search(line)
        if m:
            stack, spills = int(m.group(1)), int(m.group(2)) + int(m.group(3))
        m = _USED.search(line)
        if m and name:
            smem = _SHARED.search(line)
            static = int(smem.group(1)) if smem else 0
            rows.append(
                KernelResources(
                    name, arch, int(m.group(1)), spills, stack, static,
                    dynamic.get(name, -1), threads.get(name, 0),
                )
            )  # fmt: skip
            name = ""
    return rows
