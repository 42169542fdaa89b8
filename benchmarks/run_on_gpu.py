"""Run a bundle made by gpu_bundle.py on this machine's GPU; writes results/gpu.json beside it.

    python run_on_gpu.py [--repeat 50]

Every module is checked against its expected outputs before it is timed. Needs numpy and the CUDA
driver.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
if (HERE / "python").is_dir():
    sys.path.insert(0, str(HERE / "python"))
    os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")

import numpy as np  # noqa: E402


def load_runtime():
    """TVM without its compiler, with its CUDA runtime."""
    import tvm

    for library in (HERE / "python").rglob("libtvm_runtime_cuda.so"):
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as e:
            sys.exit(f"TVM's CUDA runtime does not load, so there is no usable GPU here: {e}")
    return tvm


def flatten(value):
    """Tensors of nested outputs, in order."""
    if hasattr(value, "numpy"):
        return [value.numpy()]
    return [a for v in value for a in flatten(v)]


def error(got, want):
    """Largest difference over the largest magnitude."""
    got, want = got.astype("float64"), want.astype("float64")
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    scale = float(np.abs(want).max()) or 1.0
    return float(np.abs(got - want).max()) / scale


def run(tvm, row, repeat):
    """Check one module, then time it (milliseconds a call, median and spread)."""
    from tvm.runtime.vm import VirtualMachine

    device = tvm.cuda(0)
    vm = VirtualMachine(tvm.runtime.load_module(str(HERE / row["library"])), device)
    inputs = []
    for i, dtype in enumerate(row["inputs"]):
        a = np.load(HERE / f"{row['graph']}.in{i}.npy")
        if dtype == "bfloat16":
            import ml_dtypes

            a = a.view(ml_dtypes.bfloat16)
        inputs.append(tvm.runtime.tensor(a, device))
    function = vm[row["function"]]
    got = flatten(function(*inputs))
    want = [np.load(HERE / f"{row['graph']}.out{i}.npy") for i in range(row["outputs"])]
    worst = (
        max(error(g, w) for g, w in zip(got, want, strict=True))
        if len(got) == len(want)
        else float("inf")
    )
    result = {"graph": row["graph"], "pipeline": row["pipeline"], "error": worst,
              "equal": worst <= row["tolerance"]}  # fmt: skip
    if result["equal"]:
        times = []
        for _ in range(repeat):
            device.sync()
            began = time.perf_counter()
            function(*inputs)
            device.sync()
            times.append(1000 * (time.perf_counter() - began))
        quartiles = statistics.quantiles(times, n=4) if repeat > 1 else [times[0]] * 3
        result["milliseconds"] = {"median": statistics.median(times), "least": min(times),
                                  "quartiles": quartiles}  # fmt: skip
    return result


def main():
    """Run every module of the manifest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=50)
    repeat = parser.parse_args().repeat
    tvm = load_runtime()
    if not tvm.cuda(0).exist:
        sys.exit("no CUDA device: check that the driver and libcudart are installed")
    results = []
    for row in json.loads((HERE / "manifest.json").read_text()):
        if "error" in row:
            results.append({k: row[k] for k in ("graph", "pipeline", "error")})
        else:
            results.append(run(tvm, row, repeat))
        print(json.dumps(results[-1]), flush=True)
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / "gpu.json").write_text(
        json.dumps({"device": tvm.cuda(0).device_name, "rows": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
