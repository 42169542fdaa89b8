"""Decoding a Llama beside llama.cpp: the same shapes, threads and weight formats, in turns.

Usage: python benchmarks/against_llama_cpp.py --threads 1 [--formats f16 q8_0 q4_0] --json out.json

Needs the PyPI packages `llama-cpp-python` (built for this machine) and `gguf`. A GGUF file with
drawn weights of the shapes of the graph is written to a temporary folder. One call decodes a token
after 127 others. The nearest formats are compared: fp16 with fp16, q8_0 (fp16 scale for 32 weights)
with 8 bits and fp32 scales, q4_0 with q4f16_1. llama.cpp rounds activations to 8 bits for q8_0 and
q4_0, this package to no less than the graph's own type ("ours"), or to as many with
`PartitionGemm.activation_bits=8` ("8 bits"). Engines take turns as in `models.py`.
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

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.models import OURS_8, Engine, answer  # noqa: E402

GRAPHS = {
    "f32": "llama_mlc_decode",
    "f16": "llama_mlc_decode_fp16",
    "q8_0": "llama_mlc_decode_q8f32_0",
    "q4_0": "llama_mlc_decode_q4f16_1",
}
PAST = 127


def write_gguf(path: Path, kind: str, size: str) -> None:
    """Write a Llama of the graphs' shapes with drawn weights."""
    import gguf

    from tests.graphs.sources.mlc_llama import SIZES

    dims = SIZES[size]
    hidden, ffn, heads, kv = dims["hidden"], dims["ffn"], dims["heads"], dims["kv"]
    head = hidden // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(dims["layers"])
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(dims["vocab"])
    writer.add_tokenizer_model("no_vocab")
    quantised = {
        "f32": gguf.GGMLQuantizationType.F32,
        "f16": gguf.GGMLQuantizationType.F16,
        "q8_0": gguf.GGMLQuantizationType.Q8_0,
        "q4_0": gguf.GGMLQuantizationType.Q4_0,
    }[kind]
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = rng.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(columns)
        writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)

    def vector(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, np.float32))

    matrix("token_embd.weight", dims["vocab"], hidden)
    matrix("output.weight", dims["vocab"], hidden)
    vector("output_norm.weight")
    for layer in range(dims["layers"]):
        block = f"blk.{layer}."
        vector(f"{block}attn_norm.weight")
        vector(f"{block}ffn_norm.weight")
        matrix(f"{block}attn_q.weight", heads * head, hidden)
        matrix(f"{block}attn_k.weight", kv * head, hidden)
        matrix(f"{block}attn_v.weight", kv * head, hidden)
        matrix(f"{block}attn_output.weight", hidden, hidden)
        matrix(f"{block}ffn_gate.weight", ffn, hidden)
        matrix(f"{block}ffn_up.weight", ffn, hidden)
        matrix(f"{block}ffn_down.weight", hidden, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_cpp_worker(kind: str, size: str, threads: int) -> None:
    import llama_cpp

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path, kind, size)
        model = llama_cpp.Llama(
            str(path),
            n_ctx=256,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            use_mmap=False,
        )
    model.eval(list(range(PAST)))

    def call() -> None:
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
    parser.add_argument("--formats", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
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
    print(f"{'format':8}{'ours ms':>10}{'8 bits':>10}{'llama.cpp ms':>14}   ratios")
    for kind in options.formats:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            threads, size = options.threads, options.size
            names = ["ours", OURS_8] if kind.startswith("q") else ["ours"]
            engines = [Engine(n, GRAPHS[kind], size, threads, folder, models) for n in names]
            engines.append(Engine("llama.cpp", kind, size, threads, folder, __file__))
            samples: dict[str, list[float]] = {e.name: [] for e in engines}
            try:
                for _ in range(options.rounds):
                    for engine in engines:
                        samples[engine.name].append(engine.time(options.repeats))
            finally:
                for engine in engines:
                    engine.close()
        row: dict[str, Any] = {"format": kind, "graph": GRAPHS[kind], "threads": threads}
        row["ms"] = {n: round(statistics.median(s), 3) for n, s in samples.items()}
        row["spread_ms"] = {n: [round(min(s), 3), round(max(s), 3)] for n, s in samples.items()}
        row["ratio"] = {}
        for name in names:
            pairs = zip(samples[name], samples["llama.cpp"], strict=True)
            ratios = [ours / theirs for ours, theirs in pairs]
            row["ratio"][name] = [round(f(ratios), 3) for f in (statistics.median, min, max)]
        results.append(row)
        eight = f"{row['ms'][OURS_8]:.2f}" if OURS_8 in names else ""
        print(
            f"{kind:8}{row['ms']['ours']:10.2f}{eight:>10}{row['ms']['llama.cpp']:14.2f}   "
            + ", ".join(f"{a:.2f} ({b:.2f} to {c:.2f})" for a, b, c in row["ratio"].values()),
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
