"""Say, function by function, what matched, what was refused and why, and what computes it."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import InputError, UnsupportedError
from .common import (
    CompileFailure,
    Progress,
    add_pipeline_arguments,
    add_target_argument,
    load,
    make_pipeline,
    one_line,
    parse_sizes,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("file", help="TVMScript, TVM JSON, or a torch.export program (.pt2)")
    add_target_argument(parser)
    parser.add_argument("--function", metavar="NAME", help="only this function")
    parser.add_argument(
        "--all", action="store_true", help="list every refusal, not only the first of a kind"
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="execute the generated CUDA code on the CPU and print its counters",
    )
    parser.add_argument(
        "--cuda-checks",
        metavar="NAMES",
        help="with --cuda: all, none, or names with commas of bounds, races, uninitialised, "
        "poison, divergence; -NAME leaves one out (default: $RELAX_LLM_CUDA_CHECKS, else all)",
    )
    parser.add_argument(
        "--no-upstream",
        action="store_true",
        help="with --cuda: leave out the comparison with TVM's default pipeline",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a symbolic size for --cuda; may be given several times",
    )
    add_pipeline_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the pipeline up to scheduling and print its report by function."""
    if args.cuda:
        return explain_cuda(args)
    from ..module_io import public_functions

    with Progress() as progress:
        spec = args.passes if args.passes != "default" else "default,-finish"
        pipeline = make_pipeline(args, progress, passes=spec)
        mod = load(args.file).mod
        names = list(public_functions(mod))
        if args.function is not None and args.function not in names:
            from ..errors import UnknownNameError

            raise UnknownNameError(f"function of {args.file}", args.function, names)
        try:
            pipeline(mod)
        except InputError:
            raise
        except Exception as error:
            raise CompileFailure(f"{args.file} does not compile: {one_line(error)}") from error
    print(f"target {pipeline.target}")
    for name in [args.function] if args.function else names:
        print(f"\nfunction {name}")
        lines = describe_function(pipeline.report, name, args.all)
        print("\n".join(lines) if lines else "  nothing matched and nothing was refused")
    print()
    print("\n".join(describe_rest(pipeline.report, set(names))))
    return 0


def describe_function(report: Any, function: str, everything: bool) -> list[str]:
    """Return what each pass did in one function."""
    lines: list[str] = []
    for record in report.passes:
        found = [
            f"    {where.split('.', 1)[1]}: {kind}"
            for kind, places in record.bindings.items()
            for where in places
            if where.split(".", 1)[0] == function and "." in where
        ]
        refusals = [r for r in record.refusals if r.function == function]
        if not found and not refusals:
            continue
        lines.append(f"  {record.name}")
        lines += found
        seen: dict[tuple[str, str], int] = {}
        for refusal in refusals:
            key = (refusal.kind, refusal.reason)
            seen[key] = seen.get(key, 0) + 1
            if seen[key] == 1 or everything:
                what = f"{refusal.kind} " if refusal.kind else ""
                lines.append(f"    {refusal.binding}: refused {what}- {refusal.reason}")
        hidden = len(refusals) - len(seen)
        if hidden and not everything:
            lines.append(f"    ... the same reasons at {hidden} other places (--all)")
    return lines


def describe_rest(report: Any, functions: set[str]) -> list[str]:
    """Return what belongs to no function of the input: totals, kernels, notes, empty passes."""
    lines = []
    for record in report.passes:
        parts = []
        if record.matched:
            parts.append(", ".join(f"{k} {n}" for k, n in sorted(record.matched.items())))
        elif record.fuses and not record.notes:
            parts.append("matched nothing")
        parts += record.notes
        if parts:
            lines.append(f"{record.name}: {'; '.join(parts)}")
        for refusal in record.refusals:
            if refusal.function not in functions:
                lines.append(f"  refused {refusal}")
    return lines


def explain_cuda(args: argparse.Namespace) -> int:
    """Print the counters of the CUDA code executed on the CPU, on random inputs."""
    try:
        from ..cuda_on_cpu.explain import explain_cuda as execute
    except ImportError:
        raise UnsupportedError(
            "--cuda needs the part of the package that executes CUDA code on the CPU, which this "
            "installation does not have"
        ) from None
    from ..errors import UnknownNameError
    from ..module_io import public_functions
    from ..sampling import random_arguments, sample_sizes

    if args.target == "native":
        args.target = "cuda"
    pipeline = make_pipeline(args)
    if pipeline.target.kind.name != "cuda":
        raise InputError(f"--cuda: expected a cuda target, found {args.target!r}")
    mod = load(args.file).mod
    functions = public_functions(mod)
    name = args.function or ("main" if "main" in functions else next(iter(functions)))
    if name not in functions:
        raise UnknownNameError(f"function of {args.file}", name, functions)
    sizes = {**sample_sizes(functions[name]), **parse_sizes(args.shape)}
    inputs = random_arguments(functions[name], sizes)
    if sizes:
        print("sizes: " + ", ".join(f"{k}={v}" for k, v in sizes.items()))
    found = execute(
        mod,
        inputs,
        pipeline.target,
        function=name,
        relax_pipeline=pipeline,
        checks=args.cuda_checks or True,
    )
    print(found.to_text())
    if not args.no_upstream:
        from tvm import relax

        from ..cuda_on_cpu.compare import Compared, compare_pipelines, comparison_table

        upstream = {"TVM's default": relax.get_default_pipeline(pipeline.target)}
        rows = compare_pipelines(mod, inputs, pipeline.target, upstream, name=name, function=name)
        rows.append(Compared(name, "this package", found.totals))
        print("\n" + comparison_table(rows))
    return 0
