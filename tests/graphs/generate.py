"""Makes the graphs of the corpus from the models' own code.

python tests/graphs/generate.py --list
python tests/graphs/generate.py --only mpt_hf_decode
python tests/graphs/generate.py --check              # are the committed files what the sources
give? python tests/graphs/generate.py --size real --output DIR --only llama_decode
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):  # run as a script
    sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
    import graphs  # noqa: F401

    __package__ = "graphs"

from relax_llm_passes.corpus import Graph, decode_array, encode_array, parse_module  # noqa: E402

from .build import build  # noqa: E402
from .sources import load_families  # noqa: E402

# Tokens that the printer writes and the parser refuses.
_SPELLINGS = ((re.compile(r'R\.const\("(-?inf|nan)", '), r'R.const(float("\1"), '),)


def _constants(mod: Any) -> list[Any]:
    """Tensor constants in the order in which the printer numbers them."""
    import tvm

    found = re.search(
        r'^metadata = tvm\.ir\.load_json\("""(.*?)"""\)$', mod.script(show_meta=True), re.S | re.M
    )
    if found is None:
        return []
    text = found.group(1).replace('\\"', '"').replace("\\\\", "\\")
    table = {str(key): list(value) for key, value in tvm.ir.load_json(text).items()}
    unknown = set(table) - {"ir.GenericConst"}
    if unknown:
        raise SystemExit(f"the script refers to objects that are no constants: {sorted(unknown)}")
    return [constant.value.numpy() for constant in table["ir.GenericConst"]]


def _restore(text: str) -> str:
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text


def serialise(graph: Graph) -> tuple[str, str]:
    """Module text and JSON of a graph; raises SystemExit when the text does not give the module
    back."""
    from tvm.ir import assert_structural_equal

    mod = graph.mod
    text = _restore(mod.script(show_meta=False)).rstrip() + "\n"
    constants = [encode_array(array) for array in _constants(mod)]
    again = parse_module(text, [decode_array(c) for c in constants], graph.name)
    assert_structural_equal(mod, again)
    record = dict(graph.record)
    if constants:
        record["constants"] = constants
    return text, _dump(record)


def _dump(record: dict[str, Any]) -> str:
    """JSON with one line per input and per array, so that a reader can follow it and diffs stay
    small."""
    lines = []
    for key, value in record.items():
        if key in ("inputs", "constants") and value:
            body = ",\n".join("  " + json.dumps(item) for item in value)
            lines.append(f"{json.dumps(key)}: [\n{body}\n ]")
        elif key == "golden":
            head = {k: v for k, v in value.items() if k != "outputs"}
            body = ",\n".join("  " + json.dumps(item) for item in value["outputs"])
            lines.append(f'"golden": {json.dumps(head)[:-1]}, "outputs": [\n{body}\n ]}}')
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _same(path: Path, text: str) -> bool:
    """Equal text; golden outputs may differ by what another CPU's sums round to."""
    if not path.is_file():
        return False
    old = path.read_text(encoding="utf-8")
    if old == text or path.suffix != ".json":
        return old == text
    import numpy as np

    left, right = json.loads(old), json.loads(text)
    outputs = [(left.pop("golden"), right.pop("golden"))]
    tolerance = float(left["tolerance"]["rel"])
    for record in (left, right):  # derived from the golden outputs
        record.pop("tolerance")
    close = all(
        np.allclose(decode_array(a), decode_array(b), rtol=tolerance / 8, atol=tolerance / 8)
        for one, two in outputs
        for a, b in zip(one["outputs"], two["outputs"], strict=True)
    )
    return left == right and close


def _selected(patterns: list[str]) -> list[str]:
    names = sorted(load_families())
    chosen = [n for n in names if not patterns or any(fnmatch.fnmatch(n, p) for p in patterns)]
    if not chosen:
        raise SystemExit(f"no graph matches {patterns}; known: {', '.join(names)}")
    return chosen


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the graphs and what they are")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names, with * and ?")
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    parser.add_argument("--size", default="small", help="small (default), real, or a family's own")
    parser.add_argument("--output", type=Path, help="folder to write to (needed unless small)")
    parser.add_argument("--traceback", action="store_true", help="show where a failure came from")
    options = parser.parse_args(argv)
    if options.list:
        for name in _selected(options.only):
            print(f"{name:32} {load_families()[name].special}")
        return 0
    if options.size != "small" and options.output is None:
        parser.error("--size needs --output: only the small graphs belong into the repository")
    folder = options.output or HERE / "modules"
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in _selected(options.only):
        start = time.time()
        try:
            text, record = serialise(build(name, options.size).graph)
        except Exception as err:  # one source that is not installed must not stop the others
            if options.traceback:
                traceback.print_exc()
            print(f"{name:32} FAILED {type(err).__name__}: {str(err)[:600]}", flush=True)
            failed.append(name)
            continue
        verdict = ""
        for suffix, content in ((".py", text), (".json", record)):
            path = folder / f"{name}{suffix}"
            if options.check:
                if not _same(path, content):
                    verdict += f" {path.name} DIFFERS"
                    failed.append(path.name)
            else:
                path.write_text(content, encoding="utf-8")
        size = (len(text) + len(record)) / 1024
        print(f"{name:32} {time.time() - start:5.1f} s {size:6.0f} KB{verdict}", flush=True)
    print(f"{len(failed)} failed" if failed else "all done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
