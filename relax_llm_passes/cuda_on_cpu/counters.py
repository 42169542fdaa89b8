"""What the checks found and what a launch cost, as Python values."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Finding", "LaunchStats", "parse_findings", "parse_launches", "totals"]


@dataclass(frozen=True)
class Finding:
    """One thing that a check found, with the number of times it happened."""

    kind: str
    kernel: str
    text: str
    line: int = 0
    source: str = ""
    count: int = 1

    def __str__(self) -> str:
        place = f" at line {self.line}" if self.line else ""
        code = f": {self.source}" if self.source else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"[{self.kind}] {self.kernel}{place}: {self.text}{times}{code}"


@dataclass(frozen=True)
class LaunchStats:
    """Counters of one kernel launch.

    Bytes, sectors, bank conflicts, lanes and balance are counted by the instrumented build only
    (``checked``). ``milliseconds`` is time on this CPU and says nothing about a GPU.

    Attributes
    ----------
    barriers : int
        ``__syncthreads`` summed over the blocks.
    global_read, global_written : int
        Bytes that the threads asked for.
    global_read_unique, global_written_unique : int
        Bytes of memory touched at all: what the launch cannot do without.
    global_read_sectors, global_write_sectors : int
        Sectors of 32 bytes per warp access, summed: what the warps ask of the L1 cache.
    shared_accesses, bank_conflicts : int
        Warp accesses to shared memory, and the cycles they need beyond the first.
    lane_use : float
        Lanes that take part in a memory access of a warp, mean of 0..1.
    balance : float
        Mean over maximum of the threads' memory accesses between barriers, 0..1.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    static_shared: int
    dynamic_shared: int
    barriers: int
    warp_operations: int
    milliseconds: float
    checked: bool
    global_read: int
    global_written: int
    global_read_unique: int
    global_written_unique: int
    global_read_sectors: int
    global_write_sectors: int
    shared_read: int
    shared_written: int
    shared_accesses: int
    bank_conflicts: int
    warp_accesses: int
    lane_accesses: int
    atomics: int
    balance: float

    @property
    def blocks(self) -> int:
        """Blocks in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def barriers_per_block(self) -> float:
        """Barriers that one block runs through, mean."""
        return self.barriers / self.blocks

    @property
    def lane_use(self) -> float:
        """Share of a warp's lanes that take part in its memory accesses."""
        return self.lane_accesses / (32 * self.warp_accesses) if self.warp_accesses else 0.0

    @property
    def bytes_over_minimum(self) -> float:
        """Bytes moved between warps and memory over the bytes touched at all; 1 is ideal.

        Moved are whole sectors, once per warp access: lanes that read the same word count once.
        """
        least = self.global_read_unique + self.global_written_unique
        moved = 32 * (self.global_read_sectors + self.global_write_sectors)
        return moved / least if least else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every counter and derived figure, JSON-able."""
        fields = {k: getattr(self, k) for k in self.__dataclass_fields__}
        for name in ("blocks", "threads", "barriers_per_block", "lane_use", "bytes_over_minimum"):
            fields[name] = getattr(self, name)
        return fields


@functools.lru_cache(maxsize=4096)
def _line_of(library: str, offset: int) -> tuple[int, str]:
    """(line in the CUDA source, its text) of an instruction of a compiled kernel library."""
    try:
        # The address is the one after the call of the hook.
        out = subprocess.run(
            ["addr2line", "-e", library, hex(offset - 1)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0, ""
    m = re.search(r"kernel\.cu:(\d+)", out)
    if m is None:
        return 0, ""
    line = int(m.group(1))
    try:
        text = Path(library).with_suffix(".cu").read_text().splitlines()[line - 1].strip()
    except (OSError, IndexError):
        text = ""
    return line, text[:200]


def parse_findings(text: str) -> list[Finding]:
    """Findings from the runtime's JSON, places resolved to source lines."""
    found = []
    for f in json.loads(text):
        line, source = f["line"], ""
        if f["library"]:
            line, source = _line_of(f["library"], f["offset"])
        found.append(Finding(f["kind"], f["kernel"], f["text"], line, source, f["count"]))
    return found


def parse_launches(text: str) -> list[LaunchStats]:
    """Launches from the runtime's JSON, in the order they ran."""
    rows = json.loads(text)
    for r in rows:
        r["grid"], r["block"] = tuple(r["grid"]), tuple(r["block"])
    return [LaunchStats(**r) for r in rows]


def totals(launches: Iterable[LaunchStats], least_bytes: int = 0) -> dict[str, Any]:
    """Sums over launches.

    Parameters
    ----------
    launches : iterable of LaunchStats
        In any order.
    least_bytes : int
        Bytes of the inputs and outputs of the whole computation, each once; adds
        ``bytes_over_minimum`` against that.

    Returns
    -------
    dict
        launches, blocks, barriers, the byte counts, bank_conflicts, and of all memory accesses
        together ``lane_use`` and ``conflicts`` (extra cycles per access to shared memory).
    """
    launches = list(launches)
    names = ("barriers", "global_read", "global_written", "global_read_unique",
             "global_written_unique", "global_read_sectors", "global_write_sectors",
             "shared_read", "shared_written", "shared_accesses", "bank_conflicts",
             "warp_accesses", "lane_accesses", "atomics")  # fmt: skip
    result: dict[str, Any] = {n: sum(getattr(x, n) for x in launches) for n in names}
    result["launches"] = len(launches)
    result["blocks"] = sum(x.blocks for x in launches)
    result["lane_use"] = result["lane_accesses"] / max(1, 32 * result["warp_accesses"])
    result["conflicts"] = result["bank_conflicts"] / max(1, result["shared_accesses"])
    if least_bytes:
        moved = result["global_read_unique"] + result["global_written_unique"]
        result["least_bytes"] = least_bytes
        result["bytes_over_minimum"] = moved / least_bytes
    return result
