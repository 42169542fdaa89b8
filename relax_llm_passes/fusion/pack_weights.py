"""PackWeights: weights of products laid out once, at load, for the target's register tiles.

    y = gemm(x, w)        ->    main_transform_params(w):  packed = pack(w)
                                main(x, packed):           y = gemm_packed(x, packed)

Takes "gemm" composites that `cpu.gemm` computes, whose weight is a parameter after the function's
`num_input` (TVM's convention) or a constant. Constants are packed now; for parameters TVM's
LiftTransformParams makes the function that packs: `<name>_transform_params`, or one
`transform_params` with `shared=True`. It takes and returns a tuple, as TVM's
`LazyTransformParams` and mlc-llm expect. Group-quantised weights stay as they are: they are read in
order already. No gain for decode alone: plain layouts run at the memory's bandwidth there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax

from ..errors import InputError
from ..kernels.cpu_gemm import gemm_kernel
from ..kernels.cpu_implementation import spec_of
from ..kernels.cpu_pack import pack_array, pack_kernel, packed_shape
from ..lower import Composite, composites
from ..registry import PassRun, register_pass
from ..report import Refusal

__all__ = ["PackWeights", "PackWeightsOptions"]


@dataclass(frozen=True)
class PackWeightsOptions:
    """Options of PackWeights.

    Attributes
    ----------
    shared : bool
        Make one `transform_params` for all functions (prefill and decode of one model), which
        must have the same weights. Without it each function gets its own.
    """

    shared: bool = False


@relax.expr_functor.mutator
class _Packer(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, run: PassRun, target: tvm.target.Target) -> None:
        super().__init__(mod)
        self.run = run
        self.target = target
        self.known = composites(mod)
        self.weights: set[Any] = set()
        self.packed: dict[Any, Any] = {}
        self.function = ""

    def start(self, name: str, func: relax.Function) -> relax.Function:
        inputs = func.attrs.get("num_input", None) if func.attrs else None
        self.function = name
        self.weights = set() if inputs is None else set(list(func.params)[int(inputs) :])
        self.packed = {}
        return self.visit_expr(func)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, tvm.ir.GlobalVar):
            return call
        composite = self.known.get(call.op.name_hint)
        if composite is None or composite.kind != "gemm":
            return call
        new = self.pack(composite, call)
        if isinstance(new, Refusal):
            self.run.record.refuse(new)
            return call
        self.run.record.match("weight", 1, self.function)
        return new

    def pack(self, composite: Composite, call: relax.Call) -> relax.Expr | Refusal:
        try:
            spec, roles = spec_of(composite)
        except InputError as error:
            return Refusal(str(error), "gemm", self.function, composite.name)
        if spec.quant is not None or not isinstance(spec.n, int):
            reason = "a quantised weight" if spec.quant is not None else "symbolic columns"
            return Refusal(reason, "gemm", self.function, composite.name)
        args = [call.args[composite.roles[role]] for role in roles]
        weight = self.weight(args[1], spec.layout, spec.n, spec.k, spec.rhs_dtype)
        if weight is None:
            reason = "its weight is computed, no parameter after num_input and no constant"
            return Refusal(reason, "gemm", self.function, composite.name)
        for i, step in enumerate(composite.attrs.get("epilogue") or []):
            if step["op"] == "bias":
                at = roles.index(step["operand"])
                if args[at].ty.ndim != 1:
                    args[at] = self.builder_.emit(relax.op.reshape(args[at], (spec.n,)), f"bias{i}")
        spec = replace(spec, layout="packed")
        kernel = gemm_kernel(spec, self.target).without_attr("global_symbol")
        gvar = self.builder_.add_func(kernel, spec.key())
        leading = list(args[0].ty.shape.values)[:-1]
        out = relax.TensorType([*leading, spec.n], spec.out_dtype)
        return relax.call_tir(gvar, [args[0], weight, *args[2:]], out)

    def weight(self, weight: Any, layout: str, n: int, k: int, dtype: str) -> Any:
        key = (weight, layout)
        if key in self.packed:
            return self.packed[key]
        if isinstance(weight, tvm.ir.GenericConst):
            array = pack_array(weight.value.numpy(), layout, self.target)
            result: Any = relax.const(array, dtype)
        elif weight in self.weights:
            kernel = pack_kernel(n, k, layout, dtype, self.target).without_attr("global_symbol")
            gvar = self.builder_.add_func(kernel, f"pack_{layout}_{n}_{k}_{dtype}")
            out = relax.TensorType(list(packed_shape(n, k, self.target)), dtype)
            result = self.builder_.emit(relax.call_tir(gvar, [weight], out), "packed")
        else:
            return None
        self.packed[key] = result
        return result


@register_pass("PackWeights", stage="optional", options=PackWeightsOptions)
def PackWeights(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Pack the weights of products at load, and at compile time where they are constants."""
    target = run.target
    if target is None or target.kind.name != "llvm":
        run.record.note("no llvm target: nothing was packed")
        return mod
    packer = _Packer(mod, run, target)
    changed = {}
    for gvar, func in mod.functions.items():
        if isinstance(func, relax.Function) and gvar.name_hint not in packer.known:
            new = packer.start(gvar.name_hint, func)
            if not new.same_as(func):
                changed[gvar.name_hint] = new
    if not run.record.matched:
        return mod
    result = packer.builder_.get()
    for name, func in changed.items():
        result.update_func(result.get_global_var(name), func)
    if mod.attrs:
        result = result.with_attrs(dict(mod.attrs))
    lift = relax.transform.LiftTransformParams(shared_transform=run.options.shared)
    return lift(result)
