"""Run a bundle made by gpu_bundle.py on this machine's GPU and write what was measured.

    python BUNDLE/run_on_gpu.py [--repeat 50] [--output FILE]

Every module is checked against its expected outputs before it is timed. Writes
benchmarks/results/GPU-NAME.json under the current directory unless --output says otherwise, and
nothing inside the bundle. Needs numpy and the CUDA driver.

Exits with 1 when one of this package's modules fails or is not equal to its expected outputs, with
2 when nothing could be run.
"""

import argparse
import ctypes
import datetime
import json
import os
import platform
import re
import statistics
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.dont_write_bytecode = True  # the bundle may be read-only, and is not ours to change
if (HERE / "python").is_dir():
    sys.path.insert(0, str(HERE / "python"))
    os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")

import numpy as np  # noqa: E402


def stop(text):
    """End the program with status 2: there is nothing to measure."""
    print(text, file=sys.stderr)
    sys.exit(2)


def load_runtime(manifest):
    """TVM without its compiler, with its CUDA runtime."""
    built_for = tuple(manifest["python"])
    if sys.version_info[:2] != built_for:
        stop(f"this bundle is for Python {built_for[0]}.{built_for[1]}, this is "
             f"{platform.python_version()}")  # fmt: skip
    import tvm

    for library in sorted((HERE / "lib").glob("*.so*")):
        try:
            ctypes.CDLL(library.name, mode=ctypes.RTLD_GLOBAL)  # the machine's own, if it has one
        except OSError:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for library in (HERE / "python").rglob("libtvm_runtime_cuda.so"):
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as e:
            stop(f"TVM's CUDA runtime does not load, so there is no usable GPU here: {e}")
    if not tvm.cuda(0).exist:
        stop("no CUDA device: check that the driver is installed and sees the GPU")
    return tvm


def flatten(value):
    """Tensors of nested outputs, in order."""
    if hasattr(value, "numpy"):
        return [value]
    return [a for v in value for a in flatten(v)]


def widen(array, dtype):
    """An array of the bundle, or bits of bf16, as numbers."""
    if dtype == "bfloat16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def to_device(tvm, array, dtype):
    """Copy to the GPU; bf16 comes as its bits, for numpy has no such type."""
    device = tvm.cuda(0)
    if dtype != "bfloat16":
        return tvm.runtime.tensor(array, device)
    import ml_dtypes

    return tvm.runtime.tensor(array.view(ml_dtypes.bfloat16), device)


def error(got, want):
    """Largest difference over the largest magnitude."""
    got, want = got.astype("float64"), want.astype("float64")
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    scale = float(np.abs(want).max()) or 1.0
    return float(np.abs(got - want).max()) / scale


def check(row, outputs):
    """The largest error over the outputs; infinite when there are too few or too many."""
    if len(outputs) != len(row["outputs"]):
        return float("inf")
    worst = 0.0
    for i, (got, dtype) in enumerate(zip(outputs, row["outputs"], strict=True)):
        want = np.load(HERE / f"{row['graph']}.out{i}.npy")
        worst = max(worst, error(widen(got.numpy(), str(got.dtype)), widen(want, dtype)))
    return worst


def run(tvm, row, repeat):
    """Check one module, then time it (milliseconds a call, median and spread)."""
    from tvm.runtime.vm import VirtualMachine

    device = tvm.cuda(0)
    vm = VirtualMachine(tvm.runtime.load_module(str(HERE / row["library"])), device)
    inputs = [
        to_device(tvm, np.load(HERE / f"{row['graph']}.in{i}.npy"), dtype)
        for i, dtype in enumerate(row["inputs"])
    ]
    function = vm[row["function"]]
    worst = check(row, flatten(function(*inputs)))
    result = {"error": worst, "tolerance": row["tolerance"], "equal": worst <= row["tolerance"]}
    if not result["equal"]:
        return result
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


def results_file(chosen, device):
    """Where to write; found out before anything is measured."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = Path(chosen) if chosen else Path("benchmarks") / "results" / f"{slug}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as e:
        stop(f"cannot write the results: {e}; name another place with --output")
    return path


def main():
    """Run every module of the manifest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=50, help="timed calls of each module")
    parser.add_argument("--output", help="the file to write")
    arguments = parser.parse_args()
    manifest = json.loads((HERE / "manifest.json").read_text())
    tvm = load_runtime(manifest)
    device = tvm.cuda(0).device_name
    output = results_file(arguments.output, device)
    rows = []
    failures = 0
    for row in manifest["rows"]:
        result = {"graph": row["graph"], "pipeline": row["pipeline"]}
        if "failed" in row:
            result["failed"] = row["failed"]  # it did not compile
        else:
            try:
                result.update(run(tvm, row, arguments.repeat))
            except Exception as e:
                traceback.print_exc()
                result["failed"] = f"{type(e).__name__}: {str(e).strip().splitlines()[-1][:300]}"
        # TVM's own pipeline may fail: then there is nothing to compare with.
        failures += row["pipeline"] != "tvm" and not result.get("equal", False)
        rows.append(result)
        print(json.dumps(result), flush=True)
    record = {
        "device": device,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arch": manifest["arch"],
        "emulated": manifest["emulated"],
        "repeat": arguments.repeat,
        "rows": rows,
    }
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {output}")
    if failures:
        print(f"{failures} of this package's modules failed or differ", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
