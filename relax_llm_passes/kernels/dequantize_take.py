"""Rows of a group-quantised table: the implementation of the "dequantize_take" composite.

    out[..., k] = (field of packed[ids[...], k // per_word] - max_int) * scale[ids[...], k // group]

An elementwise function without a schedule: the pipeline's rules for such functions do as well as
any, and what follows it (a reshape, a cast) can fuse into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx

from ..lower import Accept, Composite, register_implementation
from ..patterns.dequantize_take import KIND
from ..patterns.shapes import same_dim
from ..report import Refusal

__all__ = ["DequantizeTake"]


@register_implementation(KIND, priority=10)
class DequantizeTake:
    """The looked-up rows, unpacked in the type of the table."""

    name = "dequantize_take"
    kind = KIND
    targets = ("llvm", "cuda")

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take formats whose words hold a whole number of fields."""
        attrs = composite.attrs
        columns = composite.result_ty.shape.values[-1]
        words = composite.ty("packed").shape.values[1]
        per_word = tvm.DataType(attrs["packed_dtype"]).bits // attrs["bits"]
        if not same_dim(words, tirx.ceildiv(columns, per_word)):
            return Refusal(
                f"{words} words of {attrs['packed_dtype']} for {columns} values of "
                f"{attrs['bits']} bits, expected {per_word} in a word",
                KIND,
            )
        return Accept()

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir."""
        attrs = composite.attrs
        bits, group = int(attrs["bits"]), int(attrs["group"])
        word = tvm.DataType(attrs["packed_dtype"])
        per_word = word.bits // bits
        out = composite.result_ty
        columns = out.shape.values[-1]
        dtype = str(out.dtype)

        def rows(packed: te.Tensor, scale: te.Tensor, ids: te.Tensor) -> te.Tensor:
            def value(*at: Any) -> Any:
                row, k = ids(*at[:-1]), at[-1]
                if attrs["mode"] == "clip":
                    row = tirx.max(tirx.min(row, packed.shape[0] - 1), 0)
                field = packed(row, tirx.floordiv(k, per_word))
                if per_word > 1:
                    shift = tirx.Cast(str(word), tirx.floormod(k, per_word) * bits)
                    field = (field >> shift) & tirx.const((1 << bits) - 1, str(word))
                integer = tirx.Cast("int32", field) - int(attrs["max_int"])
                scaled = scale(row, tirx.floordiv(k, group))
                return tirx.Cast(dtype, integer) * scaled.astype(dtype)

            return te.compute((*ids.shape, columns), value, name="rows")

        order = [args[composite.roles[role]] for role in ("packed", "scale", "ids")]
        return bb.call_te(rows, *order, primfunc_name_hint="dequantize_take")
