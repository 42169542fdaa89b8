"""Drop-ins for TVM's `partition_for_cublas` and `partition_for_cutlass`.

They give GEMMs the form that the external code generators of a TVM built with these libraries read:
a function with `Codegen` around one with `Composite = "cublas.matmul_transposed_bias"`, whose body
is exactly what TVM's pattern of that name describes. From the general recogniser they take the part
of each GEMM that the pattern can hold, and nothing that the library's code generator gets wrong:
permutations that are no transpose, biases that broadcast or widen, an operand in two roles, sizes
that would need a shape argument, batches that do not line up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from ..dataflow import FunctionView, op_name, type_vars
from ..outline import Region
from ..patterns.gemm import GemmMatch
from ..patterns.shapes import dims, dtype_of, is_one, static
from ..report import Refusal
from .partition_gemm import partition

__all__ = ["partition_for_cublas", "partition_for_cutlass"]


@dataclass(frozen=True)
class _Library:
    """What the code generator of one library takes."""

    name: str
    pairs: dict[str, tuple[str, ...]]  # operand dtype -> dtypes of the product
    activations: dict[str, str]  # operator -> suffix, after a bias
    residual: bool = False


_CUBLAS = _Library(
    "cublas",
    {
        "float16": ("float16", "float32"),
        "bfloat16": ("bfloat16", "float32"),
        "float32": ("float32",),
        "int8": ("int32",),
        "float8_e4m3fn": ("float16", "bfloat16", "float32"),
    },
    {"relax.nn.relu": "_relu", "relax.nn.gelu": "_gelu"},
)
_CUTLASS = _Library(
    "cutlass",
    {"float16": ("float16", "float32"), "float32": ("float32",), "int8": ("int32",)},
    {"relax.nn.relu": "_relu", "relax.nn.gelu": "_gelu"},
    residual=True,
)


@dataclass
class _Body:
    """The bindings of a pattern as it grows."""

    name: str
    variables: list[relax.Var]
    roles: dict[str, relax.Expr]
    result: relax.Var
    operands: list[relax.Expr] = field(default_factory=list)


def _same(a: relax.Expr, b: relax.Expr) -> bool:
    return bool(a.same_as(b))


def _grow(view: FunctionView, body: _Body, library: _Library, region: Region) -> None:
    """Add bias, activation and residual, as far as the library's patterns go."""
    inside = {view.resolve(v) for v in region.bindings}

    def following(*names: str) -> Any:
        users = view.users(body.result)
        if len(users) != 1 or view.is_output(body.result) or users[0].var not in inside:
            return None
        return users[0] if op_name(users[0].value) in names else None

    def other_side(binding: Any) -> relax.Expr | None:
        sides = [view.resolve(a) for a in binding.value.args]
        rest = [s for s in sides if not _same(s, body.result)]
        if len(rest) != 1 or any(_same(rest[0], r) for r in body.roles.values()):
            return None  # the library would get one argument for two roles
        return rest[0]

    def take(binding: Any, suffix: str) -> None:
        body.variables.append(binding.var)
        body.result = binding.var
        body.name += suffix

    n = (dims(body.result) or [None])[-1]
    binding = following("relax.add")
    other = other_side(binding) if binding is not None else None
    shape = dims(other) if other is not None else None
    if binding is None or other is None or not shape:
        return
    if static(shape[-1]) is None or static(shape[-1]) != static(n):
        return
    if not all(is_one(d) for d in shape[:-1]):
        return
    body.roles["bias"] = other
    take(binding, "_bias")
    activation = following(*library.activations)
    if activation is not None:
        take(activation, library.activations[op_name(activation.value)])
    if not library.residual:
        return
    binding = following("relax.add", "relax.multiply")
    other = other_side(binding) if binding is not None else None
    if binding is None or other is None or dims(other) is None:
        return
    body.roles["residual"] = other
    take(binding, "_residual_" + op_name(binding.value).rpartition(".")[2])
    relu = following("relax.nn.relu")
    if relu is not None:
        take(relu, "_relu")


def _why_not(view: FunctionView, product: relax.Var, body: _Body, library: _Library) -> str | None:
    call = view.call(product)
    assert call is not None
    lhs, rhs = call.args
    left = dtype_of(lhs)
    if left not in library.pairs or dtype_of(product) not in library.pairs[left]:
        return f"{library.name} has no {left} product in {dtype_of(product)}"
    a, b = dims(lhs), dims(rhs)
    assert a is not None and b is not None
    if len(a) < 2:
        return f"a vector: {library.name} wants at least two axes"
    if static(a[-1]) is None:
        return f"the summed axis is symbolic: {library.name} wants a number"
    if _same(body.roles["lhs"], body.roles["rhs"]):
        return "both operands are the same tensor, which the code generator passes once"
    if left == "int8" and (static(a[-1]) or 0) % 4 + (static(b[-1]) or 1) % 4:
        return "int8 sizes that are no multiples of 4"
    if left.startswith("float8"):
        size = static(b[-2]), static(b[-1])
        if "_transposed" not in body.name or any(s is None or s % 16 for s in size):
            return "float8 wants a transposed weight and sizes that are multiples of 16"
    if not all(is_one(d) for d in b[:-2]) and all(is_one(d) for d in a[:-2]):
        return "one left operand for several right ones"
    bound: set[Any] = set()
    needed: set[Any] = set()
    for expr in [*body.roles.values(), *body.variables]:
        for dim in dims(expr) or ():
            if isinstance(dim, tvm.tirx.Var):
                bound.add(dim)
        needed.update(type_vars(expr.ty))
    bound -= {d for v in body.variables for d in dims(v) or () if isinstance(d, tvm.tirx.Var)} - {
        d for e in body.roles.values() for d in dims(e) or () if isinstance(d, tvm.tirx.Var)
    }
    if needed - bound:
        names = ", ".join(sorted(v.name for v in needed - bound))
        return f"a size in {names} that no operand states alone would become a shape argument"
    return None


def _chooser(library: _Library) -> Any:
    def choose(view: FunctionView, match: GemmMatch) -> Region | Refusal:
        product, region = match.product, match.region
        call = view.call(product)
        assert call is not None
        lhs, rhs = (view.resolve(a) for a in call.args)
        body = _Body(f"{library.name}.matmul", [product], {"lhs": lhs, "rhs": rhs}, product)
        permute = view.call(rhs, "relax.permute_dims")
        inside = {view.resolve(v) for v in region.bindings}
        if permute is not None and rhs in inside and region.attrs["rhs_layout"] == "NK":
            root = view.resolve(permute.args[0])
            if _same(root, region.roles.get("rhs", rhs)):
                body.name += "_transposed"
                body.variables.insert(0, rhs)
                body.roles["rhs"] = root
        _grow(view, body, library, region)
        reason = _why_not(view, product, body, library)
        if reason is not None:
            return Refusal(reason, "gemm", view.name, product.name)
        return Region(
            kind="gemm",
            bindings=body.variables,
            roles=body.roles,
            outputs={"out": body.result},
            name="fused_" + body.name.replace(".", "_"),
            codegen=library.name,
            composite=body.name,
        )

    return choose


def partition_for_cublas(mod: tvm.IRModule, bind_constants: bool = False) -> tvm.IRModule:
    """Partition a module for TVM's cuBLAS code generator.

    Parameters
    ----------
    mod : IRModule
        The module.
    bind_constants : bool
        Keep constant operands inside the functions instead of passing them.

    Returns
    -------
    IRModule
        With one function for each product, as `relax.transform.RunCodegen` expects them.
    """
    return partition(mod, _bound(_chooser(_CUBLAS), bind_constants))


def partition_for_cutlass(
    mod: tvm.IRModule, annotate_codegen: bool = True, use_flash_mqa: bool = True
) -> tvm.IRModule:
    """Partition a module for TVM's CUTLASS code generator.

    GEMMs are found by this package; convolutions, layer norms and dequantising products by
    TVM's own patterns. Attention is left where it is: TVM 0.27's CUTLASS partitioning stops with a
    KeyError on any attention operator.

    Parameters
    ----------
    mod : IRModule
        The module.
    annotate_codegen : bool
        Wrap each composite in a function with the `Codegen` attribute.
    use_flash_mqa : bool
        Accepted for compatibility; it concerns attention only.
    """
    del use_flash_mqa
    choose = _chooser(_CUTLASS)
    if not annotate_codegen:
        choose = _without_codegen(choose)
    mod = partition(mod, choose)
    others = _other_patterns(mod)
    if not others:
        return mod
    return relax.transform.FuseOpsByPattern(
        others, bind_constants=False, annotate_codegen=annotate_codegen
    )(mod)


def _bound(choose: Any, bind_constants: bool) -> Any:
    if not bind_constants:
        return choose

    def bound(view: FunctionView, match: GemmMatch) -> Region | Refusal:
        region = choose(view, match)
        if isinstance(region, Region):
            # A constant without a role stays inside.
            region.roles = {
                k: v for k, v in region.roles.items() if not isinstance(v, tvm.ir.GenericConst)
            }
        return region

    return bound


def _without_codegen(choose: Any) -> Any:
    def plain(view: FunctionView, match: GemmMatch) -> Region | Refusal:
        region = choose(view, match)
        if isinstance(region, Region):
            region.codegen = ""
        return region

    return plain


_OTHER_OPERATORS = {"relax.nn.conv2d": "conv2d", "relax.nn.layer_norm": "layer_norm"}


def _other_patterns(mod: tvm.IRModule) -> Sequence[Any]:
    """Return TVM's patterns for operators that the module has and this package does not offload."""
    present: set[str] = set()

    def visit(expr: Any) -> None:
        name = op_name(expr)
        if name in _OTHER_OPERATORS:
            present.add(_OTHER_OPERATORS[name])

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    if not present:
        return []
    import tvm.relax.backend.cuda.cutlass  # noqa: F401  (registers the patterns)
    from tvm.relax.backend.pattern_registry import get_patterns_with_prefix

    return [
        p
        for p in get_patterns_with_prefix("cutlass")
        if any(word in str(p.name) for word in present)
    ]
