"""Compile a graph or the corpus, run it, and compare with the golden outputs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..errors import InputError
from .common import (
    Progress,
    add_pipeline_arguments,
    add_target_argument,
    disabled_passes,
    load,
    make_pipeline,
    parse_sizes,
    write_text,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "file",
        nargs="?",
        help="TVMScript, TVM JSON or .pt2: compared with TVM's plain lowering of the same program",
    )
    parser.add_argument(
        "--corpus",
        nargs="?",
        const="",
        metavar="DIR",
        help="the graphs of a folder (default: the checkout's tests/graphs), with golden outputs",
    )
    add_target_argument(parser)
    parser.add_argument("--only", metavar="PATTERN", help="graphs whose name contains or matches")
    parser.add_argument("--json", metavar="FILE", help="write the results; '-' is stdout")
    parser.add_argument(
        "--no-upstream", action="store_true", help="say nothing about TVM's default pipeline"
    )
    parser.add_argument(
        "--fresh-upstream",
        action="store_true",
        help="compile with TVM's default pipeline also where an earlier run's result is kept",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for one compilation"
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a symbolic size; may be given several times",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs")
    add_pipeline_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check every case; exit code 0 when all pass, else 1."""
    from ..checking import Settings, check_cases, corpus_cases, file_cases, passed, summary

    if (args.file is None) == (args.corpus is None):
        raise InputError("check: give a FILE or --corpus [DIR]")
    if args.jobs < 1 or args.timeout <= 0:
        raise InputError("check: --jobs and --timeout must be positive")
    if args.pass_config:
        raise InputError("check: --pass-config is not taken; use --passes 'default,Name{option=v}'")
    make_pipeline(args)  # a mistyped target or pass is told once, not by every worker
    if args.file is not None:
        load(args.file)
        cases = file_cases(args.file)
    else:
        cases = corpus_cases(args.corpus or None, args.only)
    settings = Settings(
        target=args.target,
        verify=args.verify,
        upstream=not args.no_upstream,
        fresh_upstream=args.fresh_upstream,
        jobs=args.jobs,
        timeout=args.timeout,
        passes=args.passes,
        disabled=disabled_passes(args),
        sizes=parse_sizes(args.shape),
        seed=args.seed,
    )
    width = max(len(c.name) for c in cases)
    entries: list[dict[str, Any]] = []
    people = sys.stderr if args.json == "-" else sys.stdout  # programs read stdout then
    with Progress(len(cases)) as progress:
        for entry in check_cases(cases, settings, lambda case: progress(case.name)):
            entries.append(entry)
            progress.clear()
            print(line(entry, width), file=people, flush=True)
    if args.json:
        write_text(args.json, json.dumps(entries, indent=2))
    print(summary(entries), file=people)
    return 0 if all(passed(e) for e in entries) else 1


def line(entry: dict[str, Any], width: int) -> str:
    """Return one result for people."""
    parts = [f"{entry['status']:<8} {entry['graph']:<{width}}"]
    if entry["max_rel_err"] is not None:
        parts.append(f"error {entry['max_rel_err']:.1e} of {entry['tol']:.0e}")
    if entry["launches"] is not None:
        other = entry["launches_upstream"]
        parts.append(f"launches {entry['launches']}" + (f" of {other}" if other else ""))
    if entry["upstream_status"] != "not run":
        parts.append(f"TVM's default: {entry['upstream_status'][:70]}")
    if entry.get("message"):
        parts.append(entry["message"])
    return "  ".join(parts)
