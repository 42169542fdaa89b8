"""default_pipeline: the stages from a Relax module to what TVM's code generators take.

`stages(target)` returns the same passes as lists by stage name, to cut and recombine:

    parts = stages(target)
    graph_only = tvm.transform.Sequential(parts["clean"] + parts["raise"] + parts["fuse"])
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from . import finish, libraries, registry
from . import report as _report
from .errors import InputError
from .rewriting import paused_gc
from .shared_views import shared_views
from .spec import Step, resolve
from .targets import TargetLike, parse_target, split_libraries
from .verify import Verifier, verifying

__all__ = ["Pipeline", "default_pipeline", "deferred_pipeline", "stages"]

# The graph stages by pass name, in order. Target-dependent choices are made inside the passes.
GRAPH_PASSES: dict[str, tuple[str, ...]] = {
    "clean": ("ExpandAttention", "ExpandRotaryKernels", "CanonicalizeBindings"),
    "raise": ("RaiseSoftmax",),
    "fuse": (
        "FuseWkv",
        "FuseGroupNormGate",
        "FuseTokenMix",
        "FuseRotaryAttention",
        "FuseSplitRotary",
        "FuseDequantizeTake",
        "PartitionGemm",
        "FuseRowReductions",
    ),
    "lower": (
        "LowerComposites",
        "JoinRowProducts",
        "LegalizeNorms",
        "ReplaceWkvKernels",
        "SealKernels",
        "KeepEffects",
    ),
}


_MAY_FAIL = ("clean", "raise", "fuse", "optional")


def _steps(target: Target) -> list[Step]:
    steps: list[Step] = []

    def own(stage: str) -> None:
        for name in GRAPH_PASSES[stage]:
            steps.append(Step(name, stage, registry.get_pass(name)))

    def upstream(stage: str, passes: Sequence[tvm.transform.Pass]) -> None:
        steps.extend(Step(str(p.info.name), stage, p) for p in passes)

    own("clean")
    own("raise")
    own("fuse")
    upstream("lower", finish.dispatch_passes())
    own("lower")
    upstream("lower", finish.fuse_passes())
    steps.append(Step("ScheduleKernels", "schedule", registry.get_pass("ScheduleKernels")))
    upstream("finish", finish.finalize_passes(target))
    return steps


def stages(target: TargetLike | None = None) -> dict[str, list[tvm.transform.Pass]]:
    """Return the default pipeline's passes by stage: clean, raise, fuse, lower, schedule, finish.

    The lists are fresh: change them freely.
    """
    result: dict[str, list[tvm.transform.Pass]] = {}
    for step in _steps(parse_target(target)):
        result.setdefault(step.stage, []).append(step.transform)
    return result


def _enabled(step: Step, ctx: tvm.transform.PassContext) -> str | None:
    """Return why TVM's pass context leaves this pass out, or None."""
    info = step.transform.info
    if str(info.name) in [str(n) for n in ctx.disabled_pass or []]:
        return "disabled by PassContext(disabled_pass=...)"
    required = str(info.name) in [str(n) for n in ctx.required_pass or []]
    if not required and int(ctx.opt_level) < int(info.opt_level):
        return f"left out: opt_level={ctx.opt_level} is below the pass's level {info.opt_level}"
    return None


@tvm.transform.module_pass(opt_level=0, name="relax_llm")
class Pipeline:
    """A TVM pass that runs the package's pipeline and keeps a report.

    Attributes
    ----------
    target : Target or None
        What it compiles for; None means `Target.current()` when it runs.
    report : Report
        Of the latest run.
    """

    def __init__(
        self,
        target: Target | None,
        spec: str,
        options: dict[str, dict[str, Any]],
        disabled: Sequence[str],
        chosen_libraries: Sequence[str],
        verify: bool,
        dump_dir: str | Path | None,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.target = target
        self.spec = spec
        self.options = options
        self.disabled = tuple(disabled)
        self.libraries = tuple(chosen_libraries)
        self.verify = verify
        self.dump_dir = Path(dump_dir) if dump_dir else None
        self.progress = progress
        self.report = _report.Report()
        if target is not None:
            self.steps(target)  # unknown names and options are reported here, not in the middle

    def steps(self, target: Target) -> list[Step]:
        """Return the passes that run for `target`, in order."""
        default = libraries.insert(_steps(target), self.libraries, target)
        options = libraries.options(self.libraries, self.options)
        return resolve(self.spec, default, options, self.disabled)

    @paused_gc()
    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Run every step; a step that is disabled leaves a note in the report."""
        target = self.target or parse_target(None)
        self.report = _report.Report(target=str(target))
        verifier = Verifier(mod, target) if self.verify else None
        with target, _report.collect(self.report), verifying(self.verify), shared_views():
            for number, step in enumerate(self.steps(target)):
                if self.progress:
                    self.progress(step.name)
                mod = self._run(step, mod, ctx, verifier)
                if self.dump_dir:
                    self.dump_dir.mkdir(parents=True, exist_ok=True)
                    path = self.dump_dir / f"{number:02d}_{step.name}.py"
                    path.write_text(mod.script(show_meta=False))
        return mod

    def _run(
        self,
        step: Step,
        mod: tvm.IRModule,
        ctx: tvm.transform.PassContext,
        verifier: Verifier | None,
    ) -> tvm.IRModule:
        left_out = _enabled(step, ctx) or finish.unsafe_here(step.name, mod)
        count = len(self.report.passes)
        if left_out:
            self.report.add(_report.PassRecord(step.name)).note(left_out)
            return mod
        start = time.perf_counter()
        try:
            new = step.transform(mod)
        except Exception as error:
            # The program is whole without a fusion, and a verified pipeline can do without every
            # pass of this package. TVM's lowering has no way around it: without it, something
            # later would fail and not say why.
            own = any(p.name == step.name for p in registry.list_passes())
            optional = step.stage in _MAY_FAIL or (verifier is not None and own)
            if not optional or isinstance(error, InputError):
                raise
            if len(self.report.passes) == count:
                self.report.add(_report.PassRecord(step.name))
            reason = (str(error).strip().splitlines() or [""])[-1].strip()
            text = f"undone: {type(error).__name__}: {reason}"
            self.report.passes[-1].note(text)
            warnings.warn(f"{step.name} failed and was left out: {text}", stacklevel=2)
            return mod
        seconds = time.perf_counter() - start
        if len(self.report.passes) == count:
            self.report.add(_report.PassRecord(step.name, seconds))
        if verifier is not None:
            new = verifier.after(step, mod, new, self.report.passes[-1])
        return new


def default_pipeline(
    target: TargetLike | None = None,
    *,
    passes: str = "default",
    options: dict[str, dict[str, Any]] | None = None,
    disabled: Sequence[str] = (),
    pack_weights: bool = False,
    verify: bool = False,
    dump_dir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> tvm.transform.Pass:
    """Return the pipeline that compiles a Relax module for `target`.

    Parameters
    ----------
    target : str, mapping or Target, optional
        See `targets.parse_target`. Text may begin with libraries, as tvmc's composite targets
        did: "cublas, cuda -arch=sm_90". None takes `Target.current()`, here if there is one and
        else when the pipeline runs.
    passes : str
        What to run, as text: "default", "default,-FuseOps", "default,InplaceKVCache", or a list
        of pass and stage names. See `spec`.
    options : dict, optional
        Options by pass name: `{"LowerComposites": {"avoid": ("cpu.gemv",)}}`.
    disabled : sequence of str
        Names of passes that do not run.
    pack_weights : bool
        For llvm targets: keep weights in the layout the kernels read fastest. Each function's
        parameters then come from `<name>_transform_params`, called once at load (see PackWeights).
    verify : bool
        Check the module after every pass, and run every kernel that was chosen against the
        program it replaces; where they differ the program stays and the report says so.
    dump_dir : path, optional
        Write the module after every pass into this folder.
    progress : callable, optional
        Called with each pass's name before it runs.

    Returns
    -------
    tvm.transform.Pass
        With a `report` of its latest run.

    Raises
    ------
    UnknownNameError
        For an unknown target kind, pass, option or library.
    InputError
        For values that do not fit.

    Examples
    --------
    >>> seq = relax_llm_passes.default_pipeline("cuda -arch=sm_90")
    >>> ex = tvm.compile(mod, seq.target, relax_pipeline=seq)
    >>> print(seq.report.to_text())
    """
    chosen: list[str] = []
    if isinstance(target, str):
        chosen, target = split_libraries(target)
        libraries.check(chosen)
    if target is None and Target.current(allow_none=True) is None:
        resolved = None
    else:
        resolved = parse_target(target)
    if not isinstance(passes, str) or not passes.strip(" ,"):
        raise InputError(f"passes={passes!r}: expected text such as 'default,-FuseOps'")
    if pack_weights:
        passes = f"{passes},PackWeights"
    return Pipeline(
        resolved, passes, dict(options or {}), disabled, chosen, verify, dump_dir, progress
    )


def deferred_pipeline(**options: Any) -> tvm.transform.Pass:
    """Return the pipeline for `relax_pipeline="relax_llm"`: the target is known when it runs."""
    return default_pipeline(None, **options)
