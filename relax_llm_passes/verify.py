"""Checks while compiling: the module after every pass, each kernel against what it replaces.

A composite carries the program it stands for, so a kernel can be checked with no other reference:
both are run on random inputs at sampled sizes, and where they differ the program stays.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax
from tvm_ffi import structural_equal

from .cloning import Clone
from .errors import RelaxLLMError
from .report import PassRecord
from .sampling import random_arguments, sample_sizes, to_device, to_numpy

if TYPE_CHECKING:
    from .lower import Composite, Implementation
    from .spec import Step

__all__ = ["Unverified", "Verifier", "active", "check_kernel", "verifying"]

# Stages after which the module is still plain Relax, with the signatures it came with.
_RELAX_STAGES = ("clean", "raise", "fuse", "optional", "lower", "schedule")

# Largest difference over the largest magnitude. The two programs sum in another order, and in
# fp16 and bf16 the original rounds between its operators where a kernel keeps fp32, so the bound
# is a multiple of the type's rounding step: 2^-24, 2^-11, 2^-8.
_TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
# The same where the user allows left operands of 8 or 16 bits: half a step of the largest value.
_ACTIVATIONS = {8: 2e-2, 16: 2e-4}

_ACTIVE: contextvars.ContextVar[bool] = contextvars.ContextVar("relax_llm_verify", default=False)


def active() -> bool:
    """Say whether kernels are to be checked as they are chosen."""
    return _ACTIVE.get()


@contextlib.contextmanager
def verifying(on: bool = True) -> Iterator[None]:
    """Check kernels as they are chosen, inside the block."""
    token = _ACTIVE.set(on)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def signatures(mod: tvm.IRModule) -> dict[str, Any]:
    """Return parameter and result types of the module's public Relax functions."""
    return {
        gvar.name_hint: ([p.ty for p in func.params], func.ret_ty)
        for gvar, func in mod.functions.items()
        if isinstance(func, relax.Function) and func.attrs and "global_symbol" in func.attrs
    }


class Unverified(RelaxLLMError):
    """A kernel could not be compared with its original; the text says why."""


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:160]


def _ends(text: str, most: int = 200) -> str:
    """Return the text on one line; of a long one what it begins and ends with.

    TVM says first what is wrong and last of which value, with the program between.
    """
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


class Verifier:
    """Checks a module after each pass of a pipeline; a pass that breaks it is undone."""

    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target) -> None:
        self.target = target

    def after(
        self, step: Step, before: tvm.IRModule, after: tvm.IRModule, record: PassRecord
    ) -> tvm.IRModule:
        """Return `after`, or `before` with a note in the record when `after` is not sound."""
        problem = self.problem(step, before, after)
        if problem is None:
            return after
        record.note(f"undone: {problem}")
        return before

    def problem(self, step: Step, before: tvm.IRModule, after: tvm.IRModule) -> str | None:
        """Return what is wrong with `after`, or None."""
        if step.stage not in _RELAX_STAGES:
            return None
        try:
            relax.analysis.well_formed(after)
        except Exception as error:
            # Not the pass's fault when it was given such a module.
            if not relax.analysis.check_well_formed(before):
                return None
            return f"the result is not well-formed: {_ends(str(error))}"
        if step.stage == "optional":
            return None
        old, new = signatures(before), signatures(after)
        for name, (params, result) in old.items():
            if name not in new:
                return f"function {name!r} is gone"
            if len(params) != len(new[name][0]):
                return f"function {name!r} has {len(new[name][0])} parameters, had {len(params)}"
            same = structural_equal(
                relax.FuncType(params, result), relax.FuncType(*new[name]), map_free_vars=True
            )
            if not same:
                return f"the signature of function {name!r} changed"
        return None


def _module(func: relax.Function, extra: tvm.IRModule | None = None) -> tvm.IRModule:
    attrs = {"global_symbol": "main"}
    main = relax.Function(func.params, func.body, func.ret_ty, func.is_pure)
    functions = dict(extra.functions.items()) if extra is not None else {}
    mod = tvm.IRModule(functions)
    mod["main"] = main.with_attrs(attrs)
    return mod


class _Program:
    """A module's `main`, compiled once and called with numpy arguments."""

    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, pipeline: Any) -> None:
        self.device = tvm.cuda(0) if target.kind.name == "cuda" else tvm.cpu()
        executable = tvm.compile(mod, target, relax_pipeline=pipeline)
        self.function = relax.VirtualMachine(executable, self.device)["main"]

    def __call__(self, arguments: Sequence[Any]) -> list[np.ndarray]:
        placed = to_device(arguments, self.device)
        return to_numpy(self.function(*placed))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest magnitude; infinity where NaNs differ."""
    if found.shape != expected.shape:
        return float("inf")
    if expected.size == 0:
        return 0.0
    a, b = found.astype("float64"), expected.astype("float64")
    if (np.isnan(a) != np.isnan(b)).any():
        return float("inf")
    finite = np.isfinite(b)
    if (a[~finite & ~np.isnan(b)] != b[~finite & ~np.isnan(b)]).any():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = max(float(np.abs(b[finite]).max()), 1e-30)
    return float(np.abs(a[finite] - b[finite]).max()) / scale


def check_kernel(
    composite: Composite,
    implementation: Implementation,
    target: tvm.target.Target,
    samples: int = 2,
    seed: int = 0,
) -> str | None:
    """Run an implementation and the composite's own body on the same random inputs.

    Returns
    -------
    str or None
        What differs, or None.

    Raises
    ------
    Unverified
        When nothing could be compared: no device for the target, or an original that TVM cannot
        run by itself.
    """
    if target.kind.name == "cuda" and not tvm.cuda(0).exist:
        raise Unverified("no CUDA device here")
    from .finish import finalize_passes

    emitted = emit_alone(composite, implementation, target)
    with target:
        emitted = tvm.transform.Sequential(
            [relax.transform.LegalizeOps(), *finalize_passes(target)]
        )(emitted)
    try:
        reference = _Program(
            _module(Clone({}, {}).function(composite.func)),
            tvm.target.Target({"kind": "llvm"}),
            "default",
        )
    except Exception as error:
        raise Unverified(f"TVM cannot compile the original: {_last_line(error)}") from error
    kernel = _Program(emitted, target, None)
    quant = composite.attrs.get("quant") or {}
    rounding = _ACTIVATIONS.get(int(quant.get("activation_bits", 0)), 0.0)
    for sample in range(samples):
        sizes = sample_sizes(composite.func, sample)
        try:
            arguments = random_arguments(composite.func, sizes, seed + sample)
            expected = reference(arguments)
        except Exception as error:
            raise Unverified(f"the original does not run: {_last_line(error)}") from error
        found = kernel(arguments)
        if len(found) != len(expected):
            return f"{len(found)} outputs, expected {len(expected)}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            bound = max(_TOLERANCE.get(str(b.dtype), 0.0), rounding)
            apart = difference(a, b)
            if not apart <= bound:
                at = f" at {sizes}" if sizes else ""
                return f"output {i} differs by {apart:.2g} (bound {bound:.0e}){at}"
    return None


def emit_alone(
    composite: Composite, implementation: Implementation, target: tvm.target.Target
) -> tvm.IRModule:
    """Return a module whose `main` has the composite's signature and calls the implementation."""
    bb = relax.BlockBuilder()
    func = Clone({}, {}).function(composite.func)
    with target, bb.function("main", func.params):
        with bb.dataflow():
            result = implementation.emit(composite, list(func.params), bb, target)
            output = bb.emit_output(result)
        bb.emit_func_output(output)
    return bb.get()
