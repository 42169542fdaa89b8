"""Packing weights once, at load: panels of columns, K-major, one layout for decode and prefill.

A weight of N columns becomes (N / columns, K, columns) in its own dtype, the last panel filled with
zeros. A matrix-vector product reads it as one stream; a matrix product uses the panels as they are.
`columns` is the width of the target's register tile, so packed weights belong to a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from ..errors import InputError
from .cpu_build import T, TensorSpec, build_kernel, i64, let, load, store
from .cpu_tiles import cpu_tiles

__all__ = ["pack_array", "pack_kernel", "packed_shape"]


def packed_shape(n: int, k: int, target: tvm.target.Target) -> tuple[int, int, int]:
    """Return the shape of a packed weight of N columns for an llvm target."""
    columns = cpu_tiles(target).columns
    return -(-n // columns), k, columns


def pack_array(weight: np.ndarray, layout: str, target: tvm.target.Target) -> np.ndarray:
    """Pack a weight now.

    Parameters
    ----------
    weight : ndarray
        (N, K) or (K, N), any dtype.
    layout : str
        "NK" or "KN".

    Returns
    -------
    ndarray
        (N / columns, K, columns), contiguous.
    """
    if weight.ndim != 2 or layout not in ("NK", "KN"):
        raise InputError(f"weight {weight.shape} as {layout!r}: expected two axes, NK or KN")
    rows = weight if layout == "NK" else weight.T
    n, k = rows.shape
    panels, _, columns = packed_shape(n, k, target)
    full = np.zeros((panels * columns, k), weight.dtype)
    full[:n] = rows
    return np.ascontiguousarray(full.reshape(panels, columns, k).transpose(0, 2, 1))


def pack_kernel(
    n: int, k: int, layout: str, dtype: str, target: tvm.target.Target
) -> tirx.PrimFunc:
    """Return a PrimFunc (weight, packed) that does the same at run time, on all threads."""
    if layout not in ("NK", "KN"):
        raise InputError(f"weight layout {layout!r}: expected NK or KN")
    return _build(n, k, layout, dtype, cpu_tiles(target).columns)


@lru_cache(maxsize=256)
def _build(n: int, k: int, layout: str, dtype: str, columns: int) -> tirx.PrimFunc:
    panels = -(-n // columns)
    shape = (n, k) if layout == "NK" else (k, n)

    def body(buffers: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
        with T.parallel(i64(0), i64(panels)) as panel:
            with T.serial(i64(0), i64(k)) as at:
                with T.serial(i64(0), i64(columns)) as j:
                    column = let(panel * columns + j)
                    inside = let(tirx.min(column, i64(n - 1)))
                    source = inside * k + at if layout == "NK" else at * n + inside
                    value = load(buffers["weight"], source, 1, dtype)
                    if n % columns:
                        value = tirx.Select(column < n, value, tirx.const(0, dtype))
                    store(buffers["packed"], value, (panel * k + at) * columns + j)

    return build_kernel(
        f"pack_{layout}_{n}_{k}_{dtype}",
        [TensorSpec("weight", shape, dtype)],
        [TensorSpec("packed", (panels, k, columns), dtype)],
        body,
    )
