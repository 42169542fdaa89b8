"""Name every pass with its options, and the libraries, kernels and targets."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .common import add_target_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_target_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--markdown", action="store_true", help="print docs/passes.md, made from what is registered"
    )


def inventory(target: str) -> dict[str, Any]:
    """Return everything that is registered, as plain data."""
    from .. import libraries, lower, registry
    from ..options import describe, document
    from ..pipeline import default_pipeline
    from ..targets import SUPPORTED_KINDS

    pipeline: Any = default_pipeline(target)
    steps = pipeline.steps(pipeline.target)
    own = {p.name for p in registry.list_passes()}
    passes = []
    for factory in registry.list_passes():
        texts = document(factory.options_type)
        passes.append(
            {
                "name": factory.name,
                "stage": factory.stage,
                "summary": factory.summary,
                "default": any(s.name == factory.name for s in steps),
                "options": [
                    {"name": n, "type": t, "default": d, "summary": texts.get(n, "")}
                    for n, t, d in describe(factory.options_type)
                ],
            }
        )
    return {
        "passes": passes,
        "pipeline": [
            {"name": s.name, "stage": s.stage, "from": "package" if s.name in own else "tvm"}
            for s in steps
        ],
        "libraries": [
            {"name": x.name, "targets": list(x.targets), "summary": x.summary}
            for x in libraries.list_libraries()
        ],
        "implementations": [
            {"kind": x.kind, "name": x.name, "targets": list(x.targets)}
            for x in lower.list_implementations()
        ],
        "targets": [*SUPPORTED_KINDS, "native"],
    }


def run(args: argparse.Namespace) -> int:
    """Print the inventory."""
    found = inventory(args.target)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    if args.markdown:
        print(markdown(found))
        return 0
    stage = ""
    for entry in found["passes"]:
        if entry["stage"] != stage:
            stage = entry["stage"]
            print(f"{stage}:")
        mark = "" if entry["default"] else "  (only when asked for)"
        print(f"  {entry['name']:<24} {entry['summary']}{mark}")
        for option in entry["options"]:
            print(f"    {option['name']}: {option['type']} = {option['default']}")
            if option["summary"]:
                print(f"        {option['summary']}")
    print(f"default pipeline for {args.target} (* of this package, the rest TVM's):")
    names = [p["name"] + ("*" if p["from"] == "package" else "") for p in found["pipeline"]]
    for start in range(0, len(names), 5):
        print("  " + ", ".join(names[start : start + 5]))
    print("libraries (before the target, as in 'cublas, cuda'):")
    for x in found["libraries"] or []:
        print(f"  {x['name']:<16} {', '.join(x['targets']):<12} {x['summary']}".rstrip())
    if not found["libraries"]:
        print("  none")
    print("implementations, in the order they are asked:")
    for x in found["implementations"]:
        print(f"  {x['kind']:<16} {x['name']:<24} {', '.join(x['targets'])}")
    print("targets: " + ", ".join(found["targets"]))
    return 0


def markdown(found: dict[str, Any]) -> str:
    """Return the inventory as a page: one table row a pass, options beneath."""
    lines = [
        "# Passes",
        "",
        "Made by `relax-llm-passes list --markdown` from what is registered.",
        "",
        "| pass | stage | by default | what it does |",
        "| --- | --- | --- | --- |",
    ]
    for entry in found["passes"]:
        runs = "yes" if entry["default"] else "when asked for"
        lines.append(f"| `{entry['name']}` | {entry['stage']} | {runs} | {entry['summary']} |")
    lines += [
        "",
        "## Options",
        "",
        "| option | type | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for entry in found["passes"]:
        for option in entry["options"]:
            kind = option["type"].replace("|", "\\|")
            name = f"{entry['name']}.{option['name']}"
            lines.append(f"| `{name}` | {kind} | `{option['default']}` | {option['summary']} |")
    lines += ["", "## Libraries", "", "Named before the target, as in `cublas, cuda`.", ""]
    lines += [
        f"- `{x['name']}` ({', '.join(x['targets'])}): {x['summary']}" for x in found["libraries"]
    ]
    lines += ["", "## Implementations", "", "In the order in which they are asked.", ""]
    lines += [
        f"- {x['kind']}: `{x['name']}` ({', '.join(x['targets'])})"
        for x in found["implementations"]
    ]
    return "\n".join(lines)
