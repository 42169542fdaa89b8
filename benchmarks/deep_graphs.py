"""The corpus's graphs with as many layers as one likes, with no framework to trace them.

Compile time depends on how many bindings a graph has and how they hang together, not on how wide
its matrices are. `deepen` chains copies of a two-layer graph: each copy has weights and caches of
its own, and reads, in place of the embedding, what the copy before gave to its head. What depends
on neither and stands before the first layer (positions, masks) is computed once, as in the model.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Tuple, Var
from tvm.relax import BlockBuilder, DataflowBlock, Expr, Function, VarBinding, op

from relax_llm_passes import corpus
from relax_llm_passes.cloning import Clone, new_seq
from relax_llm_passes.dataflow import FunctionView, op_name
from relax_llm_passes.rewriting import set_function_type

_FLOATS = ("float", "bfloat")


def _in_layer(view: FunctionView, row: int, own: list[Var], embedded: Var) -> bool:
    """Whether a binding computes with weights other than the embedding's."""
    binding = view.bindings[row]
    return not binding.var.same_as(embedded) and any(v in own for v in view.reads(row))


def deepen(name: str, layers: int) -> tuple[tvm.IRModule, str]:
    """Return a graph of the corpus with this many layers (an even number), and its function."""
    graph = corpus.load(name)
    mod, function = graph.mod, graph.function
    copies, rest = divmod(layers, 2)
    if rest or layers < 2:
        raise ValueError(f"{layers} layers: the corpus's graphs have 2, so even numbers only")
    if copies == 1:
        return mod, function
    view = FunctionView(mod, function)
    func, bindings = view.function, view.bindings
    embedded = next(
        b.var
        for b in bindings
        if op_name(b.value) == "relax.take" and str(view.dtype(b.var)).startswith(_FLOATS)
    )
    head = [b for b in bindings if op_name(b.value) == "relax.matmul"][-1]
    hidden = head.value.args[0]
    outputs = view.value(func.body.body).fields[:]  # the logits, then caches or states
    own = [p for p in func.params if str(view.dtype(p)).startswith(_FLOATS)]
    params = [p for p in func.params if not str(view.dtype(p)).startswith(_FLOATS)]

    mine: set[Expr] = {*own, embedded}
    for row, binding in enumerate(bindings):
        if any(v in mine for v in view.reads(row)):
            mine.add(binding.var)
    first = next(r for r, b in enumerate(bindings) if _in_layer(view, r, own, embedded))
    once = {b.var for b in bindings[:first] if b.var not in mine}
    written = [b for b in bindings if b.var in once]
    results: list[Expr] = []
    before: Expr | None = None
    for number in range(copies):
        clone = Clone({}, {})
        for param in own:
            clone.env[param] = Var(f"{param.name}_{number}", param.ty)
            params.append(clone.env[param])
        for binding in bindings[:-1]:
            if binding.var in once:
                continue
            if binding.var.same_as(embedded) and before is not None:
                value = BlockBuilder().normalize(op.reshape(before, embedded.ty.shape))
                written.append(VarBinding(clone.var(embedded), value))
            else:
                written.append(clone.binding(binding))
        before = clone.expr(hidden)
        results += [clone.expr(e) for e in outputs[0 if number == copies - 1 else 1 :]]
    result = Tuple(results)
    last = Var("gv", result.ty)
    body = new_seq([DataflowBlock([*written, VarBinding(last, result)])], last)
    new = Function(params, body, last.ty, func.is_pure).with_attr("global_symbol", function)
    gvar = GlobalVar(function)
    set_function_type(gvar, new)
    functions = {gv: f for gv, f in mod.functions.items() if gv.name_hint != function}
    deep = tvm.IRModule({**functions, gvar: new}, attrs=mod.attrs, global_infos=mod.global_infos)
    deep = relax.transform.DeadCodeElimination([function])(deep)  # the heads of inner copies
    relax.analysis.well_formed(deep)
    return deep, function
