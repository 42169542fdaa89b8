"""`out = epilogue(lhs @ rhs)` on the CPU: which way a product goes, for static or symbolic M.

========== ===================================== ==========================================
weight      few rows                              many rows
========== ===================================== ==========================================
(N, K)      dot products along the rows           panels packed in the kernel, outer products
(K, N)      rows of the weight added up (axpy)    panels packed in the kernel, outer products
packed      M = 1: panels added up                outer products on the panels as they are
quantised   dequantised in the dot product        panels dequantised in the kernel
========== ===================================== ==========================================

With a symbolic M one PrimFunc holds both ways and looks at M when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import tvm
from tvm import tirx

from ..errors import InputError
from .cpu_axpy import emit_axpy, emit_axpy_panels, emit_axpy_rows
from .cpu_bf16_dot import with_source
from .cpu_build import T, build_kernel, choose, i64, load, store, workspace
from .cpu_dot_row import emit_dot_row
from .cpu_gemv import emit_dot_rows
from .cpu_panels import emit_panel_product
from .cpu_quantized import emit_quantised_gemv
from .cpu_quantized_columns import emit_quantised_columns
from .cpu_quantized_rows import emit_quantised_rows
from .cpu_spec import GemmSpec
from .cpu_tiles import CpuTiles, cpu_tiles

__all__ = ["gemm_kernel", "skinny_limit"]

_FLOATS = ("float32", "float16", "bfloat16")


def skinny_limit(spec: GemmSpec) -> int:
    """Return the largest M for which weights are used as they lie instead of packed.

    Packing a panel costs about as much as the products of a few rows; measured on (N, K) weights
    the two ways meet near 16 rows, on (K, N) and quantised weights near 8. Packed ones stay packed.
    """
    if spec.quant is not None:
        return 8
    return {"NK": 16, "KN": 8}.get(spec.layout, 1)


def _as_float32(buffer: Any, size: Any, tiles: CpuTiles) -> Any:
    """Return `buffer` in fp32: itself, or a converted copy."""
    if str(buffer.dtype) == "float32":
        return buffer
    copy, lanes = workspace(size), tiles.lanes
    whole = tirx.floordiv(size, i64(lanes))
    with T.serial(i64(0), whole) as i:
        store(copy, load(buffer, i * lanes, lanes), i * lanes, lanes)
    with T.serial(i64(0), size - whole * lanes) as i:
        store(copy, load(buffer, whole * lanes + i), whole * lanes + i)
    return copy


def _single(spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any]) -> None:
    lhs = _as_float32(buffers["lhs"], i64(spec.k), tiles)
    if spec.quant is not None:
        if spec.layout == "KN":
            emit_quantised_columns(spec, tiles, buffers, lhs, 1)
        else:
            emit_quantised_gemv(spec, tiles, buffers, lhs)
    elif spec.layout == "packed":
        emit_axpy_panels(spec, tiles, buffers, lhs)
    elif spec.layout == "KN":
        emit_axpy(spec, tiles, buffers, lhs)
    else:
        emit_dot_row(spec, tiles, buffers, lhs)


def _skinny(spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], m: Any) -> None:
    lhs = _as_float32(buffers["lhs"], m * spec.k, tiles)
    if spec.quant is not None:
        emit = emit_quantised_columns if spec.layout == "KN" else emit_quantised_rows
        emit(spec, tiles, buffers, lhs, m)
        return
    if spec.layout == "KN":
        emit_axpy_rows(spec, tiles, buffers, lhs, m, skinny_limit(spec))
        return
    emit_dot_rows(
        spec,
        tiles,
        buffers,
        lhs,
        m,
        rows=tiles.dot_rows,
        columns=tiles.dot_columns,
    )


def _check(spec: GemmSpec) -> None:
    for what, dtype in (
        ("lhs", spec.lhs_dtype),
        ("rhs", spec.rhs_dtype if spec.quant is None else "float32"),
        ("out", spec.out_dtype),
    ):
        if dtype not in _FLOATS:
            raise InputError(f"CPU product: {what} is {dtype}, expected one of {_FLOATS}")
    if spec.layout not in ("NK", "KN", "packed"):
        raise InputError(f"CPU product: weight layout {spec.layout!r}, expected NK, KN or packed")
    if isinstance(spec.n, str) and spec.layout == "packed":
        raise InputError("CPU product: packed panels of a symbolic N")
    if (isinstance(spec.n, int) and spec.n < 1) or spec.k < 1:
        raise InputError(f"CPU product: N={spec.n}, K={spec.k}; both must be at least 1")


def gemm_kernel(
    spec: GemmSpec, target: tvm.target.Target, tiles: CpuTiles | None = None
) -> tirx.PrimFunc:
    """Return the kernel of a product for an llvm target.

    Parameters
    ----------
    spec : GemmSpec
        Shapes, layouts, dtypes and epilogue.
    target : Target
        Its vector unit decides the tiles.
    tiles : CpuTiles, optional
        Take these instead.

    Returns
    -------
    PrimFunc
        Parameters: lhs (..., K), the weight's tensors, the epilogue's operands in order of first
        use, out (..., N). Sums are fp32.

    Raises
    ------
    InputError
        For dtypes or layouts that it does not have, or N or K of 0.
    """
    _check(spec)
    return _build(spec, tiles or cpu_tiles(target))


@lru_cache(maxsize=1024)
def _build(whole: GemmSpec, tiles: CpuTiles) -> tirx.PrimFunc:
    limit = skinny_limit(whole)

    def body(buffers: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
        spec = replace(whole, n=sizes.get(whole.n, whole.n))
        pairs = whole.lhs_dtype == whole.rhs_dtype == "bfloat16"
        with_source(tiles.bf16_dot if pairs else "", lambda: product(spec, buffers, sizes))

    def product(spec: GemmSpec, buffers: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
        m: Any = spec.m if spec.m is not None else spec.m_expr(sizes)
        if m == 1:
            _single(spec, tiles, buffers)
            return
        rows = i64(m)

        def several() -> None:
            if limit > 1:
                choose(
                    m <= limit,
                    lambda: _skinny(spec, tiles, buffers, rows),
                    lambda: emit_panel_product(spec, tiles, buffers, rows),
                )
            else:
                emit_panel_product(spec, tiles, buffers, rows)

        if spec.m is None:
            choose(tirx.EQ(m, i64(1)), lambda: _single(spec, tiles, buffers), several)
        else:
            several()

    return build_kernel(whole.key(), *whole.tensors(tiles.columns), body)
