"""Decoding beside llama.cpp: the same shapes, threads and weight formats, in turns.

Usage: python benchmarks/against_llama_cpp.py --threads 1 [--models mpt] [--formats q4_0] --json out

Needs the PyPI packages `llama-cpp-python` (built for this machine) and `gguf`. A GGUF file with
drawn weights of the shapes of the graph is written to a temporary folder. One call decodes a token
after 127 others. The nearest formats are compared. Llama: the graphs of mlc-llm in fp32, fp16, 8
bits with fp32 scales and q4f16_1. MPT and RWKV-6: the graphs of the source framework, with
quantised weights and fp16 scales as q8_0 and q4_0 have them; activations are fp32, as llama.cpp's.
llama.cpp rounds activations to 8 bits for q8_0 and q4_0, this package to no less than the graph's
own type ("ours"), or to as many with `PartitionGemm.activation_bits=8` ("8 bits"). Engines take
turns as in `models.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gguf_files import write_gguf  # noqa: E402
from benchmarks.models import OURS_8, Engine, answer  # noqa: E402

# The graph of each model and format; "+4" is one with its weights quantised (`packed_graph.py`).
GRAPHS = {
    "llama": {
        "f32": "llama_mlc_decode",
        "f16": "llama_mlc_decode_fp16",
        "q8_0": "llama_mlc_decode_q8f32_0",
        "q4_0": "llama_mlc_decode_q4f16_1",
    },
    "mpt": {
        "f32": "mpt_hf_decode",
        "f16": "mpt_hf_decode_fp16",
        "q8_0": "mpt_hf_decode+8",
        "q4_0": "mpt_hf_decode+4",
    },
    "rwkv6": {
        "f32": "rwkv6_package_decode",
        "q8_0": "rwkv6_package_decode+8",
        "q4_0": "rwkv6_package_decode+4",
    },
}
FORMATS = ("f32", "f16", "q8_0", "q4_0")
PAST = 127


def _llama_cpp_worker(which: str, size: str, threads: int) -> None:
    import llama_cpp

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        name, _, kind = which.partition("/")
        write_gguf(path, name, kind, size)
        model = llama_cpp.Llama(
            str(path),
            n_ctx=2048 if name == "rwkv6" else 256,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            use_mmap=False,
        )
    model.eval(list(range(PAST)))

    def call() -> None:
        if name != "rwkv6":  # its state cannot go back, and costs the same at every length
            model.n_tokens = PAST  # what follows is dropped from the cache by the next eval
        model.eval([5])

    call()
    print(json.dumps({"ready": time.perf_counter() - begin}), flush=True)
    answer(call)


def main() -> int:
    """Parse arguments, measure, print a table, write JSON."""
    if sys.argv[1:2] == ["--worker"]:
        _, kind, size, threads, _ = sys.argv[2:]
        _llama_cpp_worker(kind, size, int(threads))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--size", default="real")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except ImportError as error:
        print(f"{error.name} is missing: pip install llama-cpp-python gguf", file=sys.stderr)
        return 2
    models = str(ROOT / "benchmarks" / "models.py")
    results: list[dict[str, Any]] = []
    print(f"{'model':8}{'format':8}{'ours ms':>10}{'8 bits':>10}{'llama.cpp ms':>14}   ratios")
    cases = [(m, f) for m in options.models for f in options.formats if f in GRAPHS[m]]
    for model, kind in cases:
        graph = GRAPHS[model][kind]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            threads, size = options.threads, options.size
            names = ["ours", OURS_8] if kind.startswith("q") else ["ours"]
            engines = [Engine(n, graph, size, threads, folder, models) for n in names]
            engines.append(Engine("llama.cpp", f"{model}/{kind}", size, threads, folder, __file__))
            samples: dict[str, list[float]] = {e.name: [] for e in engines}
            try:
                for _ in range(options.rounds):
                    for engine in engines:
                        samples[engine.name].append(engine.time(options.repeats))
            finally:
                for engine in engines:
                    engine.close()
        row: dict[str, Any] = {"model": model, "format": kind, "graph": graph}
        row["threads"] = threads
        row["ms"] = {n: round(statistics.median(s), 3) for n, s in samples.items()}
        row["spread_ms"] = {n: [round(min(s), 3), round(max(s), 3)] for n, s in samples.items()}
        row["ratio"] = {}
        for name in names:
            pairs = zip(samples[name], samples["llama.cpp"], strict=True)
            ratios = [ours / theirs for ours, theirs in pairs]
            row["ratio"][name] = [round(f(ratios), 3) for f in (statistics.median, min, max)]
        results.append(row)
        eight = f"{row['ms'][OURS_8]:.2f}" if OURS_8 in names else ""
        times = f"{row['ms']['ours']:10.2f}{eight:>10}{row['ms']['llama.cpp']:14.2f}"
        print(
            f"{model:8}{kind:8}{times}   "
            + ", ".join(f"{a:.2f} ({b:.2f} to {c:.2f})" for a, b, c in row["ratio"].values()),
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
