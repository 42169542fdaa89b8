"""What a CPU matrix kernel is built for: every static fact about one product."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .cpu_build import TensorSpec, i64
from .cpu_epilogue import Epilogue

__all__ = ["GemmSpec", "QuantSpec"]


@dataclass(frozen=True)
class QuantSpec:
    """Group-quantised weights: value = (integer - offset) * scale of its group.

    Attributes
    ----------
    bits : int
        4 or 8; 32 / bits integers in a uint32, the first in the lowest bits.
    group : int
        Neighbours along K that share a scale.
    offset : int
        What is subtracted (7 and 127 in mlc-llm's formats).
    scale_dtype : str
        Dtype of the scales.
    activation_bits : int
        16 or 8 allow to round the left operand to integers of so many bits, with a scale for each
        group; 0 allows no more than its own type's precision.
    """

    bits: int
    group: int
    offset: int
    scale_dtype: str = "float16"
    activation_bits: int = 0

    @property
    def per_word(self) -> int:
        """Integers in a uint32."""
        return 32 // self.bits


@dataclass(frozen=True)
class GemmSpec:
    """`out[..., n] = epilogue(sum over k of lhs[..., k] * rhs[n, k])`.

    Attributes
    ----------
    lead : tuple
        Sizes of the left operand before K; texts are symbolic. Their product is M.
    n, k : int
        Columns of the result, length of the sum. N may be symbolic: a text.
    layout : str
        Of the weight: "NK", "KN", or "packed" (panels of columns, see `cpu_pack`).
    lhs_dtype, rhs_dtype, out_dtype : str
        float32, float16 or bfloat16.
    epilogue : Epilogue
        Steps between the sum and the store.
    quant : QuantSpec, optional
        Says that the weight is group-quantised along K (layout "NK" or "KN").
    """

    lead: tuple[int | str, ...]
    n: Any
    k: int
    layout: str = "NK"
    lhs_dtype: str = "float32"
    rhs_dtype: str = "float32"
    out_dtype: str = "float32"
    epilogue: Epilogue = field(default_factory=Epilogue)
    quant: QuantSpec | None = None

    @property
    def m(self) -> int | None:
        """M, or None when it is symbolic."""
        sizes = [d for d in self.lead if isinstance(d, int)]
        return math.prod(sizes) if len(sizes) == len(self.lead) else None

    def m_expr(self, sizes: Any) -> Any:
        """Return M as an expression over the symbolic sizes."""
        total: Any = i64(1)
        for dim in self.lead:
            total = total * (sizes[dim] if isinstance(dim, str) else i64(dim))
        return total

    def weight_tensors(self, columns: int) -> list[TensorSpec]:
        """Return the weight's tensors; `columns` is the width of a packed panel."""
        n, k = self.n, self.k
        if self.quant is not None:
            q = self.quant
            words, groups = (n, -(-k // q.per_word)), (n, -(-k // q.group))
            if self.layout == "KN":
                words, groups = words[::-1], groups[::-1]
            return [
                TensorSpec("rhs_packed", words, "uint32"),
                TensorSpec("rhs_scale", groups, q.scale_dtype),
            ]
        if self.layout == "packed":
            return [TensorSpec("rhs", (-(-n // columns), k, columns), self.rhs_dtype)]
        shape = (n, k) if self.layout == "NK" else (k, n)
        return [TensorSpec("rhs", shape, self.rhs_dtype)]

    def tensors(self, columns: int) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """Return inputs (lhs, weight, epilogue operands in order) and outputs."""
        out_shape = (*self.lead, self.n)
        inputs = [
            TensorSpec("lhs", (*self.lead, self.k), self.lhs_dtype),
            *self.weight_tensors(columns),
            *self.epilogue.tensors(out_shape, self.n),
        ]
        return inputs, [TensorSpec("out", out_shape, self.out_dtype)]

    def key(self) -> str:
        """Return a name for the kernel: readable, and different where anything differs."""
        lead = "x".join(str(d) for d in self.lead) or "1"
        steps = "".join("_" + op.op for op in self.epilogue.ops if op.op != "cast")
        form = self.layout
        if self.quant is not None:
            form += f"_q{self.quant.bits}g{self.quant.group}"
            if self.quant.activation_bits:
                form += f"a{self.quant.activation_bits}"
        types = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
        dtypes = "_".join(types.get(d, d) for d in (self.lhs_dtype, self.rhs_dtype, self.out_dtype))
        return f"gemm_{form}_{lead}_{self.n}_{self.k}_{dtypes}{steps}"
