"""Composites to implementations: the first that accepts wins, the rest is inlined back.

A composite is a private Relax function that carries the program it stands for (see `outline`).
An implementation says whether it takes a composite and, if so, emits the calls that replace it.
The body of a composite is the reference: `verify` runs it against what was emitted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import tvm
from tvm import relax
from tvm_ffi import structural_equal, structural_hash

from . import verify
from .cloning import new_if, new_seq
from .emission import Emitted, emission_key
from .errors import InputError
from .outline import COMPOSITE_PREFIX, inline
from .registry import PassRun, load_plugins, register_pass
from .report import Refusal
from .shape_checks import ShapeChecks, asserted_shapes

__all__ = [
    "Accept",
    "Composite",
    "Implementation",
    "LowerComposites",
    "composites",
    "implementations",
    "list_implementations",
    "register_implementation",
]


@dataclass(frozen=True)
class Accept:
    """An implementation takes the composite; `note` is shown in reports."""

    note: str = ""


@dataclass(frozen=True)
class Composite:
    """What an implementation reads of a composite.

    Attributes
    ----------
    kind : str
        "gemm", "attention", ...
    name : str
        Name of the composite's function.
    func : relax.Function
        The original program of the region.
    roles : dict[str, int]
        Role to parameter index.
    outputs : list[str]
        Names of the outputs, in the order of the result.
    attrs : dict[str, Any]
        Static facts, plain data.
    """

    kind: str
    name: str
    func: relax.Function
    roles: dict[str, int]
    outputs: list[str]
    attrs: dict[str, Any]

    def ty(self, role: str) -> Any:
        """Return the type (struct info) of the parameter that plays `role`."""
        return self.func.params[self.roles[role]].ty

    @property
    def result_ty(self) -> Any:
        """Type of the composite's result."""
        return self.func.ret_ty

    @staticmethod
    def of(gvar: tvm.ir.GlobalVar, func: Any) -> Composite | None:
        """Read a composite from a module's function, or return None when it is none of ours."""
        if not isinstance(func, relax.Function) or not func.attrs:
            return None
        kind = func.attrs.get("Composite", None)
        if kind is None or not str(kind).startswith(COMPOSITE_PREFIX):
            return None

        def read(key: str, default: Any) -> Any:
            text = func.attrs.get(key, None)
            return default if text is None else json.loads(str(text))

        return Composite(
            str(kind)[len(COMPOSITE_PREFIX) :],
            gvar.name_hint,
            func,
            read("relax_llm.roles", {}),
            read("relax_llm.outputs", []),
            read("relax_llm.attrs", {}),
        )


@runtime_checkable
class Implementation(Protocol):
    """One way to compute one kind of composite on some kinds of targets."""

    name: str
    kind: str
    targets: tuple[str, ...]

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Say whether `emit` can be called, or why not."""
        ...

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit what replaces the call; the result has the composite's type."""
        ...


@dataclass(order=True)
class _Entry:
    sort_key: tuple[int, int]
    implementation: Implementation = field(compare=False)


_IMPLEMENTATIONS: dict[str, list[_Entry]] = {}


def register_implementation(
    kind: str, priority: int = 0
) -> Callable[[type | Implementation], type | Implementation]:
    """Register an implementation (a class without constructor arguments, or an instance).

    Higher priority is asked first, then earlier registration. The same name again (a re-import)
    replaces the entry.
    """

    def decorate(item: Any) -> Any:
        instance = item() if isinstance(item, type) else item
        entries = _IMPLEMENTATIONS.setdefault(kind, [])
        entries[:] = [e for e in entries if e.implementation.name != instance.name]
        entries.append(_Entry((-priority, len(entries)), instance))
        entries.sort()
        return item

    return decorate


def implementations(kind: str, target: tvm.target.Target) -> list[Implementation]:
    """Return the implementations of `kind` for the target's kind, in the order they are asked."""
    load_plugins()
    return [
        e.implementation
        for e in _IMPLEMENTATIONS.get(kind, [])
        if target.kind.name in e.implementation.targets
    ]


def list_implementations() -> list[Implementation]:
    """Return every registered implementation by kind, in the order they are asked."""
    load_plugins()
    return [e.implementation for k in sorted(_IMPLEMENTATIONS) for e in _IMPLEMENTATIONS[k]]


def composites(mod: tvm.IRModule) -> dict[str, Composite]:
    """Return this package's composites in `mod`, by function name."""
    found = {}
    for gvar, func in mod.functions.items():
        composite = Composite.of(gvar, func)
        if composite is not None:
            found[composite.name] = composite
    return found


@dataclass(frozen=True)
class LowerOptions:
    """Options of LowerComposites.

    Attributes
    ----------
    prefer : tuple[str, ...]
        Names of implementations asked before all others (`cublas.lt+cpu.gemv`).
    avoid : tuple[str, ...]
        Names of implementations that are not asked.
    strict : bool
        Raise when an implementation that accepted fails to build its kernel. Off, that is a
        refusal, and the original program stays.
    """

    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    strict: bool = False


def choose(
    composite: Composite, target: tvm.target.Target, options: LowerOptions | None = None
) -> tuple[Implementation, Accept] | list[Refusal]:
    """Return the first implementation that accepts, or everybody's refusals."""
    options = options or LowerOptions()
    candidates = implementations(composite.kind, target)
    candidates = [c for c in candidates if c.name not in options.avoid]
    candidates.sort(key=lambda c: c.name not in options.prefer)
    refusals = []
    for candidate in candidates:
        try:
            answer = candidate.accepts(composite, target)
        except Exception as error:
            if options.strict:
                raise
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            answer = Refusal(f"it failed to say whether it takes the composite: {text}")
        if isinstance(answer, Accept):
            return candidate, answer
        refusals.append(Refusal(f"{candidate.name}: {answer.reason}", composite.kind))
    if not candidates:
        refusals.append(
            Refusal(f"no implementation for {target.kind.name} targets", composite.kind)
        )
    return refusals


class _Rewriter:
    """Replaces composite calls in one module; shares the PrimFuncs it adds."""

    def __init__(self, mod: tvm.IRModule, run: PassRun, target: tvm.target.Target) -> None:
        self.mod = mod
        self.run = run
        self.target = target
        self.bb = relax.BlockBuilder(mod)
        self.composites = composites(mod)
        self.choices: dict[str, Implementation | None] = {}
        self.seen: dict[int, list[Composite]] = {}
        self.alike: dict[str, Composite] = {}  # the first composite that is equal to this one
        self.emitted: dict[tuple[Any, ...], Emitted] = {}
        self.checks = ShapeChecks()

    def first(self, composite: Composite) -> Composite:
        """Return the first composite with the same program: layers share what is found for one."""
        if composite.name not in self.alike:
            others = self.seen.setdefault(structural_hash(composite.func), [])
            same = (c for c in others if structural_equal(c.func, composite.func))
            self.alike[composite.name] = next(same, composite)
            if self.alike[composite.name] is composite:
                others.append(composite)
        return self.alike[composite.name]

    def implementation(self, composite: Composite, function: str, binding: str) -> Any:
        """Return the implementation for a composite, asked once; layers share the answer."""
        if composite.name not in self.choices:
            self.choices[composite.name] = self.decide(composite, function, binding)
        return self.choices[composite.name]

    def decide(self, composite: Composite, function: str, binding: str) -> Implementation | None:
        """Ask the implementations and, when verification is on, check the one that accepts."""
        answer = choose(composite, self.target, self.run.options)
        if isinstance(answer, list):
            for refusal in answer:
                self.run.record.refuse(refusal.reason, composite.kind, function, binding)
            return None
        chosen = answer[0]
        if not verify.active():
            return chosen
        try:
            problem = verify.check_kernel(composite, chosen, self.target)
        except verify.Unverified as reason:
            self.run.record.note(f"{composite.name}: {chosen.name} not verified: {reason}")
            return chosen
        if problem is None:
            self.run.record.match(f"{composite.kind}:verified")
            return chosen
        self.run.record.refuse(
            f"verification: {chosen.name}: {problem}", composite.kind, function, binding
        )
        return None

    def function(self, name: str, func: relax.Function) -> relax.Function:
        mark = self.checks.mark()
        body, changed = self.seq(name, func.body)
        self.checks.forget(mark)
        if not changed:
            return func
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)

    def seq(self, name: str, body: relax.Expr) -> tuple[relax.Expr, bool]:
        if not isinstance(body, relax.SeqExpr):
            return body, False
        changed = False
        blocks = []
        for block in body.blocks:
            bindings: list[relax.Binding] = []
            block_changed = False
            for binding in block.bindings:
                new = self.binding(name, binding, isinstance(block, relax.DataflowBlock))
                block_changed |= new != [binding]
                bindings.extend(new)
            if block_changed:
                changed = True
                kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else None
                block = kind(bindings) if kind else relax.BindingBlock(bindings)
            blocks.append(block)
        return (new_seq(blocks, body.body, body.ty), True) if changed else (body, False)

    def binding(self, name: str, binding: Any, dataflow: bool) -> list[Any]:
        if not isinstance(binding, relax.VarBinding):
            return [binding]
        value = binding.value
        if isinstance(value, relax.If):
            mark = self.checks.mark()
            then, a = self.seq(name, value.true_branch)
            self.checks.forget(mark)
            other, b = self.seq(name, value.false_branch)
            self.checks.forget(mark)
            if a or b:
                new = new_if(value.cond, then, other, value.ty)
                return [relax.VarBinding(binding.var, new)]
            return [binding]
        if isinstance(value, relax.Function):
            inner = self.function(name, value)
            return [binding] if inner is value else [relax.VarBinding(binding.var, inner)]
        if not (isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar)):
            return [binding]
        composite = self.composites.get(value.op.name_hint)
        if composite is None:
            return [binding]
        composite = self.first(composite)
        implementation = self.implementation(composite, name, binding.var.name)
        if implementation is None:
            return [binding]
        return self.emit(name, binding, composite, implementation, dataflow)

    def emit(
        self, name: str, binding: Any, composite: Composite, impl: Implementation, dataflow: bool
    ) -> list[Any]:
        bb, call = self.bb, binding.value
        args = list(call.args)
        asserted = asserted_shapes(composite.func, args)
        if asserted is None:
            self.run.record.refuse(
                f"{impl.name}: a match_cast inside asserts a shape that is not known outside",
                composite.kind,
                name,
                binding.var.name,
            )
            return [binding]
        key = emission_key(composite.name, args, dataflow)
        known = self.emitted.get(key) if key is not None else None
        if known is not None and known.fits(args, call.ty):
            self.run.record.match(f"{composite.kind}:{impl.name}", 1, name, binding.var.name)
            return [*self.checks.bindings(asserted, dataflow), *known.again(args, binding.var)]
        if dataflow:
            bb._begin_dataflow_block()
        else:
            bb._begin_binding_block()
        problem = ""
        try:
            result = bb.normalize(impl.emit(composite, args, bb, self.target))
            if not structural_equal(result.ty, call.ty):
                problem = f"{impl.name} emitted {result.ty}, the composite has {call.ty}"
        except Exception as error:
            # A kernel that cannot be built costs speed; the program itself is still there.
            if self.run.options.strict:
                raise
            problem = f"{impl.name} failed: {type(error).__name__}: {error}".splitlines()[0]
        finally:
            block = bb._end_block()
        if problem:
            self.run.record.refuse(problem, composite.kind, name, binding.var.name)
            self.choices[composite.name] = None
            return [binding]
        self.run.record.match(f"{composite.kind}:{impl.name}", 1, name, binding.var.name)
        if key is not None:
            self.emitted[key] = Emitted(args, list(block.bindings), result)
        checks = self.checks.bindings(asserted, dataflow)
        return [*checks, *block.bindings, relax.VarBinding(binding.var, result)]


@register_pass("LowerComposites", stage="lower", options=LowerOptions)
def LowerComposites(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Replace each composite by its best implementation, or by its own body.

    Before: `y = composite_gemm(x, w)`. After: `y = call_tir(gemv_kernel, (x, w))`, or the
    original operators where no implementation accepts (each says why in the report).
    """
    if run.target is None:
        raise InputError(
            "LowerComposites needs a target: run it inside `with target:` or in default_pipeline"
        )
    rewriter = _Rewriter(mod, run, run.target)
    if not rewriter.composites:
        return mod
    new_functions = {}
    for gvar, func in mod.functions.items():
        if isinstance(func, relax.Function) and gvar.name_hint not in rewriter.composites:
            new = rewriter.function(gvar.name_hint, func)
            if new is not func:
                new_functions[gvar] = new
    result = rewriter.bb.get()
    for gvar, func in new_functions.items():
        result.update_func(result.get_global_var(gvar.name_hint), func)
    if mod.attrs:
        result = result.with_attrs(dict(mod.attrs))
    # What nobody took, and calls of one composite inside another, become plain operators again.
    return inline(result)
