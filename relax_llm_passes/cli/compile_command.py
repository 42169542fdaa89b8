"""Compile a module to a library that `run` and TVM's runtime load."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

from ..errors import InputError, UnknownNameError, UnsupportedError
from .common import (
    CompileFailure,
    Progress,
    add_pipeline_arguments,
    add_target_argument,
    load,
    make_pipeline,
    one_line,
    prepare_folder,
    warn,
    write_text,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("file", help="TVMScript, TVM JSON, or a torch.export program (.pt2)")
    add_target_argument(parser)
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="a shared library (.so), or the objects to link (.tar); default: the input's name "
        "with .so, in this folder. The signatures go to FILE.json",
    )
    parser.add_argument(
        "--function",
        action="append",
        default=[],
        metavar="NAME",
        help="compile only this function; may be given several times",
    )
    parser.add_argument(
        "--kv-cache",
        type=int,
        metavar="ROWS",
        help="keep keys and values of a decode function in caches of this many rows (prompt and "
        "generated tokens), written in place: a library that `run --generate` drives",
    )
    parser.add_argument(
        "--prefill",
        metavar="FILE",
        help="the model's function that takes the whole prompt, from a file of its own",
    )
    add_pipeline_arguments(parser)
    parser.add_argument(
        "--opt-level",
        type=int,
        default=2,
        metavar="N",
        help="TVM's optimisation level, 0 to 3 (default 2); passes of a higher level are left "
        "out, and the report says so",
    )
    parser.add_argument("--dump-ir", metavar="DIR", help="write the module after every pass")
    parser.add_argument("--print-pass-times", action="store_true", help="print what each pass took")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write what was matched and refused: JSON for .json, else text; '-' is stdout",
    )


def select_functions(mod: Any, names: list[str], path: str) -> Any:
    """Return the module with only the named public functions, and what they call."""
    from tvm import relax

    from ..module_io import public_functions

    if not names:
        return mod
    known = public_functions(mod)
    for name in names:
        if name not in known:
            raise UnknownNameError(f"function of {path}", name, known)
    kept = mod.clone()
    for gvar in list(kept.functions):
        if gvar.name_hint in known and gvar.name_hint not in names:
            kept[gvar] = kept[gvar].without_attr("global_symbol")
    return relax.transform.DeadCodeElimination(names)(kept)


def run(args: argparse.Namespace) -> int:
    """Compile, export, and write the signatures and the report."""
    if not 0 <= args.opt_level <= 3:
        raise InputError(f"--opt-level {args.opt_level}: expected 0 to 3")
    output = Path(args.output or f"{Path(args.file).stem or 'module'}.so")
    if output.suffix not in (".so", ".tar"):
        raise InputError(f"--output {output}: expected a name that ends in .so or .tar")
    if args.kv_cache is not None and args.kv_cache < 1:
        raise InputError(f"--kv-cache {args.kv_cache}: expected at least 1")
    import tvm

    from ..generation_record import generation_record
    from ..module_io import public_functions

    with Progress() as progress:
        # Options first: a mistyped pass should not wait for a large file to be read.
        pipeline = make_pipeline(args, progress, dump_dir=args.dump_ir)
        target = pipeline.target
        progress(f"reading {args.file}")
        mod = select_functions(load(args.file).mod, args.function, args.file)
        if args.prefill:
            progress(f"reading {args.prefill}")
            mod = with_prefill(mod, load(args.prefill).mod)
        caches = None
        if args.kv_cache is not None:
            mod, caches = with_caches(mod, args.kv_cache, args.file)
        functions = public_functions(mod)
        generation = generation_record(mod)
        if args.prefill and not generation:
            why = "" if args.kv_cache else "; --kv-cache ROWS keeps keys and values"
            warn(f"{args.file} and {args.prefill} are no step and prompt of one model{why}")
        check_tools(target, output)
        # Now that the input is good, and before minutes of work.
        prepare_folder(output.parent, "--output")
        if args.dump_ir:
            prepare_folder(args.dump_ir, "--dump-ir")
        start = time.perf_counter()
        try:
            with tvm.transform.PassContext(opt_level=args.opt_level):
                lowered = pipeline(mod)
                middle = time.perf_counter()
                progress("generating code")
                executable = tvm.compile(lowered, target, relax_pipeline=None)
        except InputError:
            raise
        except Exception as error:
            raise CompileFailure(f"{args.file} does not compile: {one_line(error)}") from error
        built = time.perf_counter()
        progress(f"linking {output}")
        export(executable, output, pipeline)
    from ..signature import write_sidecar

    more: dict[str, Any] = {}
    if pipeline.libraries:
        more["libraries"] = list(pipeline.libraries)
    if generation:
        more["generation"] = generation
    write_sidecar(output, functions, target, **more)
    finish = time.perf_counter()
    if caches is not None:
        pipeline.report.passes.insert(0, caches)
    if args.print_pass_times:
        print(pass_times(pipeline.report, middle - start, built - middle, finish - built))
    if args.report:
        text = pipeline.report.to_json() if args.report.endswith(".json") else None
        write_text(args.report, text or pipeline.report.to_text())
    size = output.stat().st_size
    print(
        f"{output}: {', '.join(functions)} for {target.kind.name}, {size / 1024:.0f} KiB, "
        f"{finish - start:.1f} s"
    )
    print_matches(pipeline.report)
    if generation:
        print(f"  generates: relax-llm-passes run {output} --generate 64 --prompt-ids 1,2,3")
    return 0


def with_prefill(mod: Any, prefill: Any) -> Any:
    """Return one module with the functions of both files, as decode and prefill."""
    from ..merging import merge_modules
    from ..module_io import public_functions

    names = [next(iter(public_functions(m)), "") for m in (mod, prefill)]
    if names[0] == names[1]:
        names = ["decode", "prefill"]
    return merge_modules(dict(zip(names, (mod, prefill), strict=True)))


def with_caches(mod: Any, rows: int, path: str) -> tuple[Any, Any]:
    """Return the module with its caches updated in place, and what the pass recorded.

    Functions that have such a twin are left out: nothing calls them.
    """
    from tvm import relax

    from .. import report
    from ..fusion.inplace_kv_cache import InplaceKVCache
    from ..fusion.inplace_twin import CREATES_ATTR, SOURCE_ATTR
    from ..module_io import public_functions

    with report.collect() as found:
        mod = InplaceKVCache(max_length=rows)(mod)
    functions = public_functions(mod)
    made = {n: f.attrs for n, f in functions.items() if f.attrs and SOURCE_ATTR in f.attrs}
    (record,) = found.passes
    if not any(CREATES_ATTR in attrs for attrs in made.values()):
        why = "; ".join(str(r) for r in record.refusals) or "no function appends to a cache"
        raise InputError(f"--kv-cache: {path} has no caches to keep: {why}")
    sources = {str(attrs[SOURCE_ATTR]) for attrs in made.values()}
    kept = mod.clone()
    for gvar in list(kept.functions):
        if gvar.name_hint in sources:
            kept[gvar] = kept[gvar].without_attr("global_symbol")
    names = [n for n in functions if n not in sources]
    return relax.transform.DeadCodeElimination(names)(kept), record


def check_tools(target: Any, output: Path) -> None:
    """Say what is missing before compiling for minutes."""
    from tvm.support import cc

    if output.suffix == ".so" and cc.get_cc() is None:
        raise UnsupportedError(
            f"linking {output} needs a C++ compiler and none was found; install g++, set CXX, or "
            "write the objects with --output NAME.tar"
        )
    if target.kind.name == "cuda":
        use_cuda_compiler()


def use_cuda_compiler() -> None:
    """Let TVM compile CUDA with what is here: NVRTC as it does by default, else nvcc."""
    if os.environ.get("TVM_CUDA_COMPILE_MODE"):
        return
    import importlib.util

    try:
        has_nvrtc = importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        has_nvrtc = False
    if has_nvrtc:
        return
    nvcc = shutil.which("nvcc") or shutil.which(
        "nvcc", path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    )
    if nvcc is None:
        raise UnsupportedError(
            "compiling for cuda needs nvcc or NVRTC's Python bindings and neither was found; "
            "install the CUDA toolkit (or set CUDA_HOME), or pip install cuda-python"
        )
    os.environ["TVM_CUDA_COMPILE_MODE"] = "nvcc"


def export(executable: Any, output: Path, pipeline: Any) -> None:
    """Write the library: under another name first, so that no half of one is left behind."""
    part = output.with_name(f".{output.stem}.{os.getpid()}{output.suffix}")
    try:
        executable.export_library(str(part), **link_options(pipeline))
        os.replace(part, output)
    except Exception as error:
        raise CompileFailure(f"{output} cannot be linked: {one_line(error)}") from error
    finally:
        part.unlink(missing_ok=True)


def link_options(pipeline: Any) -> dict[str, Any]:
    """Return what linking needs for the libraries named before the target."""
    from ..libraries import list_libraries

    flags: list[str] = []
    for library in list_libraries():
        if library.name in pipeline.libraries:
            link_flags = getattr(library, "link_flags", None)
            flags += link_flags() if callable(link_flags) else list(link_flags or ())
    return {"options": flags} if flags else {}


def pass_times(report: Any, passes: float, code: float, link: float) -> str:
    """Return a table of times, longest first."""
    rows = sorted(report.passes, key=lambda p: -p.seconds)
    width = max([len(p.name) for p in rows], default=10)
    lines = [f"{p.name:<{width}} {p.seconds * 1e3:10.1f} ms" for p in rows]
    for name, seconds in (("passes", passes), ("code generation", code), ("linking", link)):
        lines.append(f"{name:<{width}} {seconds * 1e3:10.1f} ms")
    return "\n".join(lines)


def print_matches(report: Any) -> None:
    """Print what the fusing passes found, and which of them found nothing."""
    for record in report.passes:
        if record.matched and record.name not in ("ScheduleKernels", "SealKernels"):
            found = ", ".join(f"{k} {n}" for k, n in sorted(record.matched.items()))
            print(f"  {record.name}: {found}")
        elif record.fuses and not record.matched:
            why = "; ".join(record.notes) or f"matched nothing, refused {len(record.refusals)}"
            print(f"  {record.name}: {why}")
        elif record.notes:
            print(f"  {record.name}: {'; '.join(record.notes)}")
