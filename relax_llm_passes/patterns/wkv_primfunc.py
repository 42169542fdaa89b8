"""Recognise the wkv recurrence of RWKV-5 and 6 in a PrimFunc (as mlc-style modules carry it).

Read by structure: the stores, their loops and their operands decide, names and parameter order
play no part. Expected are, inside loops over batch and head (bound to threads or not),

    new[b,h,i,j] = state[b,h,i,j]
    for t:  out[b,t,h,i] = 0;  for j:  out[b,t,h,i] += r * (u * k * v + new[b,h,i,j])
                                       new[b,h,i,j] = new[b,h,i,j] * w + k * v

with r, k [b,t,h,j], v [b,t,h,i], u [h,j], w [h,j] or [b,t,h,j]; casts may stand anywhere, and the
state may be stored the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import TensorLoad
from tvm_ffi import structural_equal

from ..kernels.norm_program import Tensor
from ..kernels.scalar_expr import substitute
from ..kernels.wkv_spec import ROLES_BONUS, WkvSpec, compact_operands
from ..report import Refusal

__all__ = ["find_wkv_primfunc"]

KIND = "wkv"
FLOATS = ("float16", "bfloat16", "float32")


class _No(Exception):
    """No recurrence; `near` when it begins like one."""

    def __init__(self, reason: str, near: bool = False) -> None:
        super().__init__(reason)
        self.near = near


@dataclass
class _Store:
    buffer: Any
    indices: list[Any]
    value: Any
    loops: tuple[Any, ...]  # loop variables around it, outermost first


def _collect(func: tirx.PrimFunc) -> tuple[list[_Store], dict[Any, Any]]:
    stores: list[_Store] = []
    extents: dict[Any, Any] = {}

    def walk(stmt: Any, loops: tuple[Any, ...], values: dict[Any, Any]) -> None:
        if isinstance(stmt, tirx.For):
            if not (isinstance(stmt.min, tirx.IntImm) and int(stmt.min.value) == 0):
                raise _No("a loop does not start at 0")
            extents[stmt.loop_var] = stmt.extent
            walk(stmt.body, (*loops, stmt.loop_var), values)
        elif isinstance(stmt, tirx.SeqStmt):
            inner = dict(values)
            for s in stmt:
                if isinstance(s, tirx.Bind):
                    inner[s.var] = substitute(s.value, inner)
                else:
                    walk(s, loops, inner)
        elif isinstance(stmt, s_tir.SBlockRealize):
            if not (isinstance(stmt.predicate, tirx.IntImm) and int(stmt.predicate.value) == 1):
                raise _No("a block has a predicate")
            block = stmt.block
            if block.match_buffers:
                raise _No("a block matches buffers")
            inner = dict(values)
            for iv, v in zip(block.iter_vars, stmt.iter_values, strict=True):
                inner[iv.var] = substitute(v, values)
            if block.init is not None:
                walk(block.init, loops, inner)
            walk(block.body, loops, inner)
        elif isinstance(stmt, tirx.BufferStore):
            stores.append(
                _Store(
                    stmt.buffer,
                    [substitute(i, values) for i in stmt.indices],
                    substitute(stmt.value, values),
                    loops,
                )
            )
        else:
            raise _No(f"a {type(stmt).__name__}")

    walk(func.body, (), {})
    return stores, extents


def _terms(expr: Any) -> list[list[Any]]:
    """Expand sums and products of loads; each term is the list of its loads."""
    if isinstance(expr, tirx.Cast):
        return _terms(expr.value)
    if isinstance(expr, tirx.Add):
        return _terms(expr.a) + _terms(expr.b)
    if isinstance(expr, tirx.Mul):
        return [a + b for a in _terms(expr.a) for b in _terms(expr.b)]
    if isinstance(expr, TensorLoad):
        return [[expr]]
    raise _No(f"a {type(expr).__name__} in a value")


def _same_indices(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(structural_equal(x, y) for x, y in zip(a, b, strict=True))


def _is(indices: Any, *wanted: Any) -> bool:
    return _same_indices(list(indices), list(wanted))


def _read(func: tirx.PrimFunc) -> WkvSpec:
    params = list(func.params)
    if not 8 <= len(params) <= 10 or not all(isinstance(p.ty, tirx.BufferType) for p in params):
        raise _No("other parameters than a recurrence has")
    stores, extents = _collect(func)
    if len(stores) != 4:
        raise _No(f"{len(stores)} stores, expected 4")
    copy, zero, add, update = stores
    new = copy.buffer
    if not isinstance(copy.value, TensorLoad) or not _same_indices(
        copy.value.indices, copy.indices
    ):
        raise _No("the first store copies no state")
    state = copy.value.source
    out = zero.buffer
    if not (isinstance(zero.value, (tirx.FloatImm, tirx.IntImm)) and float(zero.value.value) == 0):
        raise _No("the second store clears no output")
    if not (add.buffer.same_as(out) and update.buffer.same_as(new)):
        raise _No("the stores do not accumulate the output and then update the state", True)
    if len(out.ty.shape) != 4 or len(new.ty.shape) != 4:
        raise _No("other ranks than (B, T, H, N) and (B, H, N, N)", True)
    b, t, h, i = add.indices
    x, y = update.indices[2:]
    axes = [b, t, h, i, x, y]
    if not all(isinstance(v, tirx.Var) for v in axes):
        raise _No("an index is no loop variable", True)
    if not _is(update.indices[:2], b, h):
        raise _No("the state is not indexed by batch and head", True)
    value_major = x.same_as(i)
    j = y if value_major else x
    if not value_major and not y.same_as(i):
        raise _No("the state has no axis of the output's channel", True)
    for s in (add, update):
        if not {*s.loops} >= {b, t, h, i, j} or s.loops.index(t) > s.loops.index(j):
            raise _No("tokens are not the loop around the keys", True)
    if t in copy.loops or j in zero.loops or t not in zero.loops or j.same_as(t):
        raise _No("the state is copied in every token, or the output cleared for every key", True)
    if not _is(zero.indices, b, t, h, i) or len(zero.loops) > len(add.loops):
        raise _No("another output is cleared", True)
    decayed = _one([z for z in _terms(update.value) if _reads(z, new)], "decays of the state")
    fresh = _one([z for z in _terms(update.value) if not _reads(z, new)], "new products")
    w = _one([ld for ld in decayed if not ld.source.same_as(new)], "decays")
    own = _one([ld for ld in decayed if ld.source.same_as(new)], "states")
    if not _same_indices(own.indices, update.indices) or len(fresh) != 2:
        raise _No("the update is not state * w + k * v", True)
    k = _one([ld for ld in fresh if _is(ld.indices, b, t, h, j)], "keys")
    v = _one([ld for ld in fresh if _is(ld.indices, b, t, h, i)], "values")
    sums = [z for z in _terms(add.value) if not (len(z) == 1 and z[0].source.same_as(out))]
    if len(sums) != 2 or len(_terms(add.value)) != 3:
        raise _No("the output is not the sum of r * state and r * u * k * v", True)
    kept = _one([z for z in sums if _reads(z, new)], "products with the state")
    bonus = _one([z for z in sums if not _reads(z, new)], "bonus terms")
    r = _one([ld for ld in kept if not ld.source.same_as(new)], "receptances")
    seen = _one([ld for ld in kept if ld.source.same_as(new)], "states")
    if not _same_indices(seen.indices, update.indices) or not _is(r.indices, b, t, h, j):
        raise _No("r or the state has other indices", True)
    rest = list(bonus)
    for ld in (r, k, v):
        match = [z for z in rest if structural_equal(z, ld)]
        if not match:
            raise _No("the bonus is not r * u * k * v", True)
        rest.remove(match[0])
    u = _one(rest, "bonus vectors")
    per_token = _is(w.indices, b, t, h, j)
    if not per_token and not _is(w.indices, h, j):
        raise _No("w has other indices", True)
    if not _is(u.indices, h, j):
        raise _No("u has other indices", True)
    roles = {
        "r": r.source, "k": k.source, "v": v.source, "w": w.source, "u": u.source,
        "state": state, "out": out, "new_state": new,
    }  # fmt: skip
    return _spec(params, roles, extents, (b, t, h, i, j), value_major, per_token)


def _reads(term: list[Any], buf: Any) -> bool:
    return any(ld.source.same_as(buf) for ld in term)


def _one(items: list[Any], what: str) -> Any:
    if len(items) != 1:
        raise _No(f"{len(items)} {what}, expected 1", True)
    return items[0]


def _spec(
    params: list[Any],
    roles: dict[str, Any],
    extents: dict[Any, Any],
    axes: tuple[Any, ...],
    value_major: bool,
    per_token: bool,
) -> WkvSpec:
    order = []
    for p in params:
        names = [n for n, buf in roles.items() if buf.same_as(p)]
        if len(names) != 1:
            raise _No("a parameter plays no part, or two", True)
        order.append(names[0])
    if len(order) != len(roles):
        raise _No("a buffer is no parameter", True)
    tensors = []
    for name, p in zip(order, params, strict=True):
        shape = tuple(int(d.value) if isinstance(d, tirx.IntImm) else d for d in p.ty.shape)
        if str(p.ty.dtype) not in FLOATS:
            raise _No(f"{name} is {p.ty.dtype}", True)
        if any(not isinstance(d, (int, tirx.Var)) for d in shape):
            raise _No("a size is an expression", True)
        tensors.append(Tensor(name, shape, str(p.ty.dtype)))
    out_shape = roles["out"].ty.shape
    for axis, d in zip(axes[:4], out_shape, strict=True):
        if not structural_equal(extents[axis], d):
            raise _No("a loop does not cover its axis", True)
    batch, tokens, heads, size = tensors[order.index("out")].shape
    if not isinstance(size, int) or not isinstance(heads, int):
        raise _No("heads or channels are symbolic", True)
    if not structural_equal(extents[axes[4]], out_shape[3]):
        raise _No("keys and values differ in number", True)
    operands, out_at = compact_operands(
        ROLES_BONUS, batch, tokens, heads, size, value_major, per_token
    )
    return WkvSpec(
        tuple(tensors), operands, out_at, batch, tokens, heads, size, value_major=value_major
    )


def find_wkv_primfunc(func: tirx.PrimFunc, name: str = "") -> WkvSpec | Refusal | None:
    """Return the recurrence that a PrimFunc computes, a Refusal for a near miss, or None."""
    try:
        return _read(func)
    except _No as no:
        return Refusal(str(no), KIND, name) if no.near else None
    except (AttributeError, TypeError, ValueError):
        return None  # forms of statements and expressions that no recurrence has
