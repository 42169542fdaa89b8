"""How many kernels a function launches, read from the module just before memory planning.

One call of a PrimFunc is one launch on the CPU, and on a GPU one per outermost nest of loops that
is bound to threads. A call into a library counts as one. Reshapes, shape arithmetic and the
virtual machine's own builtins launch nothing. Both branches of an `If` are counted.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op
from tvm_ffi import WalkResult

__all__ = ["LaunchCounter", "count_launches", "kernels_of"]

# The pass before which every pipeline's calls still stand as call_tir and call_dps_packed.
_BEFORE = "CallTIRRewrite"

_TIR_CALLS = ("relax.call_tir", "relax.call_tir_inplace", "relax.call_tir_with_grad")


def kernels_of(func: tirx.PrimFunc, gpu: bool) -> int:
    """Return how many kernels one call of `func` launches."""
    if not gpu:
        return 1
    count = 0

    def outermost(stmt: Any) -> Any:
        nonlocal count
        if isinstance(stmt, tirx.For):
            bound = stmt.kind == tirx.ForKind.THREAD_BINDING
        else:
            bound = stmt.attr_key == "thread_extent"
        count += bound
        return WalkResult.SKIP if bound else WalkResult.ADVANCE  # nothing inside is a launch

    tvm_ffi.structural_walk(func.body, ((tirx.For, tirx.AttrStmt), outermost), order="pre")
    return count


def count_launches(mod: tvm.IRModule, target: tvm.target.Target) -> dict[str, int]:
    """Return the launches of each public Relax function of a module that is lowered to call_tir.

    Calls of operators that are not lowered yet are counted as one launch each.
    """
    gpu = target.kind.name == "cuda"
    cache: dict[str, int] = {}

    def of_global(name: str) -> int:
        if name not in cache:
            cache[name] = 0  # a recursive call counts once
            func = mod[name]
            if isinstance(func, tirx.PrimFunc):
                cache[name] = kernels_of(func, gpu)
            elif isinstance(func, relax.Function):
                cache[name] = of_function(func)
            else:
                cache[name] = 1
        return cache[name]

    def of_call(call: relax.Call) -> int:
        op = call.op
        if isinstance(op, GlobalVar):
            return of_global(op.name_hint)
        if isinstance(op, relax.ExternFunc):
            return _library_call(op)
        if not isinstance(op, Op):
            return 0  # a local closure: counted where it is defined
        if op.name in _TIR_CALLS:
            return of_global(call.args[0].name_hint)
        if op.name in (
            "relax.call_dps_packed",
            "relax.call_pure_packed",
            "relax.call_inplace_packed",
        ):
            callee = call.args[0]
            return _library_call(callee) if isinstance(callee, relax.ExternFunc) else 1
        if op.name.startswith(("relax.builtin.", "relax.vm.", "relax.memory.")):
            return 0
        if op.name in _FREE:
            return 0
        return 1

    def of_function(func: relax.Function) -> int:
        total = 0

        def visit(expr: Any) -> None:
            nonlocal total
            if isinstance(expr, relax.Call):
                total += of_call(expr)

        relax.analysis.post_order_visit(func.body, visit)
        return total

    return {
        gvar.name_hint: of_global(gvar.name_hint)
        for gvar, func in mod.functions.items()
        if isinstance(func, relax.Function) and func.attrs and "global_symbol" in func.attrs
    }


# Operators that the virtual machine does without a kernel.
_FREE = (
    "relax.shape_of",
    "relax.tensor_to_shape",
    "relax.shape_to_tensor",
    "relax.null_value",
    "relax.print",
    "relax.assert_op",
    "relax.make_closure",
    "relax.call_builtin_with_ctx",
    "relax.reshape",
)


def _library_call(func: relax.ExternFunc) -> int:
    name = str(func.global_symbol)
    # Attention over TVM's KV cache is work; the rest of vm.builtin is bookkeeping.
    return 0 if name.startswith("vm.builtin.") and "attention" not in name else 1


@tvm.ir.instrument.pass_instrument
class LaunchCounter:
    """A pass instrument that counts launches while any pipeline compiles.

    Examples
    --------
    >>> counter = LaunchCounter(target)
    >>> with tvm.transform.PassContext(instruments=[counter]):
    ...     tvm.compile(mod, target, relax_pipeline=seq)
    >>> counter.launches
    {'main': 7}
    """

    def __init__(self, target: tvm.target.Target) -> None:
        self.target = target
        self.launches: dict[str, int] = {}

    def run_before_pass(self, mod: tvm.IRModule, info: Any) -> None:
        """Count when the module reaches the pass that turns calls into virtual machine calls."""
        if str(info.name) == _BEFORE:
            self.launches = count_launches(mod, self.target)
