"""What every test of graph rewriting asks: well formed, same results, the way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.fusion.canonicalize_bindings import canonicalize
from relax_llm_passes.outline import Region, inline, outline
from relax_llm_passes.report import Refusal


def var(mod: tvm.IRModule, name: str, function: str = "main") -> relax.Var:
    """Return the variable of that name, bound in a function or in a scope inside it."""
    for scope in FunctionView(mod, function).scopes():
        for binding in scope.bindings:
            if binding.var.name == name:
                return binding.var
    raise KeyError(name)


def region(
    mod: tvm.IRModule, names: str, function: str = "main", kind: str = "gemm", **fields: Any
) -> Region:
    """Return a region of the named bindings: `region(mod, "m add relu")`."""
    return Region(kind, [var(mod, n, function) for n in names.split()], **fields)


def assert_same(left: Any, right: Any) -> None:
    """Fail with TVM's explanation unless two modules are structurally equal."""
    assert tvm_ffi.structural_equal(left, right), (
        f"--- found\n{left.script(show_meta=False)}\n--- expected\n{right.script(show_meta=False)}"
    )


def outlined(
    mod: tvm.IRModule, *regions: Region, function: str = "main"
) -> tuple[tvm.IRModule, list[Refusal]]:
    """Outline, check that the module is sound and that inlining gives the canonical input."""
    relax.analysis.well_formed(mod)
    after, refusals = outline(mod, function, regions)
    relax.analysis.well_formed(after)
    assert_signatures_kept(mod, after)
    back = inline(after)
    relax.analysis.well_formed(back)
    assert_same(canonicalize(back), canonicalize(inline(mod)))
    return after, refusals


def assert_signatures_kept(before: tvm.IRModule, after: tvm.IRModule) -> None:
    """Check the parameters and result of every function of `before`."""
    names = {gv.name_hint: gv for gv in after.get_global_vars()}
    for gvar, func in before.functions.items():
        if isinstance(func, relax.Function):
            new = after[names[gvar.name_hint]]
            assert [p.same_as(q) for p, q in zip(func.params, new.params, strict=True)]
            assert tvm_ffi.structural_equal(func.ret_ty, new.ret_ty, map_free_vars=True)


def run(mod: tvm.IRModule, *args: Any, function: str = "main") -> Any:
    """Compile with TVM's own pipeline and run on numpy arrays."""
    vm = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    result = vm[function](
        *[tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in args]
    )
    return to_numpy(result)


def to_numpy(value: Any) -> Any:
    """Convert what the virtual machine returns."""
    if hasattr(value, "numpy"):
        return value.numpy()
    if isinstance(value, tvm.runtime.ShapeTuple):
        return tuple(int(v) for v in value)
    if isinstance(value, int | float):
        return value
    return tuple(to_numpy(v) for v in value)


def composites(mod: tvm.IRModule) -> dict[str, relax.Function]:
    """Return the composite functions by name."""
    return {
        gv.name_hint: f
        for gv, f in mod.functions.items()
        if isinstance(f, relax.Function) and "Composite" in f.attrs
    }


def ops(func: relax.Function) -> list[str]:
    """Return the operators of a function's own scope, in order: "matmul", "add"; calls as names."""
    found = []
    for block in func.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call):
                op = value.op
                found.append(
                    op.name.removeprefix("relax.")
                    if isinstance(op, tvm.ir.Op)
                    else op.name_hint
                    if isinstance(op, tvm.ir.GlobalVar)
                    else type(op).__name__
                )
    return found
