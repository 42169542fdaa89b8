"""Run a function of a compiled library and time it."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, UnknownNameError, UnsupportedError
from . import generate
from .common import (
    Progress,
    one_line,
    parse_sizes,
    prepare_folder,
    set_threads,
    write_text,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("library", help="what compile wrote (NAME.so with NAME.so.json)")
    parser.add_argument("--function", metavar="NAME", help="default: main, or the only one")
    parser.add_argument(
        "--inputs", metavar="FILE.npz", help="arrays by parameter name; what is missing is drawn"
    )
    parser.add_argument(
        "--params",
        metavar="FILE",
        help="weights: .npz, .safetensors, or a Hugging Face model's folder; else they are drawn",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a symbolic size (default 16); may be given several times",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="timed calls")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of TVM's runtime")
    parser.add_argument("--output", metavar="FILE.npz", help="write the results")
    parser.add_argument("--json", metavar="FILE", help="write the times; '-' is stdout")
    generate.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Load, draw inputs, call, print."""
    if args.repeat < 1:
        raise InputError(f"--repeat {args.repeat}: expected at least 1")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: expected 0 or more")
    set_threads(args.threads)
    if args.output:
        prepare_folder(Path(args.output).parent, "--output")
    sizes = parse_sizes(args.shape)
    for size in sizes.values():
        if size >= 2**40:  # no tensor of that length fits anywhere
            raise InputError(f"--shape: {size} is too large for a size of a tensor")
    from ..signature import Signature, read_sidecar

    if not Path(args.library).is_file():
        raise InputError(f"no such file: {args.library}")
    record = read_sidecar(args.library)
    arrays = read_npz(args.inputs) if args.inputs else {}
    if args.generate is not None:
        return generate.run(args, record, arrays)
    if args.prompt_ids is not None:
        raise InputError("--prompt-ids is for --generate N")
    generates = "generation" in record
    name = choose_function(args.function, list(record["functions"]), args.library, generates)
    signature = Signature(name, record["functions"][name])
    if args.params:
        arrays = {**weights_of(signature, args.params, record, arrays), **arrays}
    sizes = signature.sizes(sizes, arrays)
    with Progress() as progress:
        progress(f"loading {args.library}")
        machine, device = load_machine(args.library, record)
        progress("drawing inputs")
        try:
            arguments = signature.arguments(sizes, args.seed, arrays)
        except (MemoryError, OverflowError) as error:
            raise InputError(f"the inputs do not fit into memory: {one_line(error)}") from None
        progress(f"running {name}")
        outputs, seconds = call(machine, name, arguments, device, args.repeat)
    if sizes:
        print("sizes: " + ", ".join(f"{k}={v}" for k, v in sizes.items()))
    drawn = [k for k in signature.leaves() if k not in arrays]
    if arrays and drawn:
        print(f"drawn with seed {args.seed}: {len(drawn)} of {len(signature.leaves())} inputs")
    for i, output in enumerate(outputs):
        print(f"output {i}: {output.dtype} {output.shape} {stats(output)}")
    print(times_line(name, seconds))
    if args.output:
        write_npz(args.output, outputs)
    if args.json:
        result = {
            "library": args.library,
            "function": name,
            "sizes": sizes,
            "seconds": seconds,
            "median": statistics.median(seconds),
        }
        write_text(args.json, json.dumps(result, indent=2))
    return 0


def choose_function(
    asked: str | None, names: list[str], library: str, generates: bool = False
) -> str:
    """Return the function to call."""
    if asked is not None:
        if asked not in names:
            raise UnknownNameError(f"function of {library}", asked, names)
        return asked
    if "main" in names or len(names) == 1:
        return "main" if "main" in names else names[0]
    hint = ", or generate text with --generate N" if generates else ""
    raise InputError(f"{library} has {', '.join(names)}: choose one with --function{hint}")


def read_npz(path: str) -> dict[str, np.ndarray]:
    """Read an .npz file."""
    try:
        file = np.load(path, allow_pickle=False)
        if not hasattr(file, "files"):
            raise InputError(f"{path} holds one array; expected an .npz with named arrays")
        with file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path} is no readable .npz file: {one_line(error)}") from None


def weights_of(
    signature: Any, path: str, record: dict[str, Any], given: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the tensors of a file that are parameters of the function."""
    from ..weights import match_weights, read_weights

    params = [
        {"name": k, "type": t} for k, t in signature.leaves().items() if t["kind"] == "tensor"
    ]
    plan = record.get("generation") or {}
    for step in (plan.get("step"), plan.get("prefill")):
        if step and step["function"] == signature.name:
            weights = {signature.record["params"][i]["name"] for i in step["weights"]}
            params = [p for p in params if p["name"] in weights]
            return match_weights(params, read_weights(path), step.get("weight_names"))
    wanted = [p for p in params if "float" in p["type"]["dtype"] and p["name"] not in given]
    return match_weights(wanted, read_weights(path), some=True)


def write_npz(path: str, outputs: list[np.ndarray], names: list[str] | None = None) -> None:
    """Write results as out0, out1, ...; numpy's files know no bfloat16, so that is widened."""
    names = names or [f"out{i}" for i in range(len(outputs))]
    arrays = {
        name: a.astype("float32") if a.dtype.kind == "V" else a
        for name, a in zip(names, outputs, strict=True)
    }
    try:
        with open(path, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def load_machine(library: str, record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Load a library and make a virtual machine on its target's device."""
    import tvm
    from tvm import relax

    kind = record.get("target", {}).get("kind", "llvm")
    device = tvm.cuda(0) if kind == "cuda" else tvm.cpu()
    if not device.exist:
        raise UnsupportedError(
            f"{library} is compiled for {kind} and this machine has no {kind} device"
        )
    try:
        module = tvm.runtime.load_module(library)
        return relax.VirtualMachine(module, device), device
    except Exception as error:
        raise InputError(f"{library} cannot be loaded: {one_line(error)}") from None


def call(
    machine: Any, name: str, arguments: list[Any], device: Any, repeat: int
) -> tuple[list[np.ndarray], list[float]]:
    """Call once to warm up, then `repeat` times; return the outputs and the seconds of each."""
    from ..sampling import to_device, to_numpy

    placed = to_device(arguments, device)
    try:
        result = machine[name](*placed)
        device.sync()
    except Exception as error:
        # What compiled code says of its arguments; the rest is no fault of theirs.
        if isinstance(error, ValueError | TypeError) or "ErrorContext" in str(error):
            raise InputError(f"{name} refuses these inputs: {one_line(error)}") from None
        raise
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        result = machine[name](*placed)
        device.sync()
        seconds.append(time.perf_counter() - start)
    return to_numpy(result), seconds


def stats(array: np.ndarray) -> str:
    """Return a few numbers about an output."""
    if array.size == 0:
        return "empty"
    values = array.astype("float64")
    bad = int((~np.isfinite(values)).sum())
    note = f", {bad} not finite" if bad else ""
    with np.errstate(invalid="ignore", over="ignore"):
        return f"mean {values.mean():.6g}, std {values.std():.6g}{note}"


def times_line(name: str, seconds: list[float]) -> str:
    """Return median and spread (half of the calls lie within)."""
    from ..environment import thread_count

    middle = statistics.median(seconds)
    threads = thread_count()
    plural = "s" if threads != 1 else ""
    text = f"{name}: median {middle * 1e3:.3f} ms"
    if len(seconds) > 1:
        low, high = np.percentile(seconds, [25, 75])
        text += f", half within {low * 1e3:.3f} to {high * 1e3:.3f} ms"
    calls = f"{len(seconds)} call" + ("s" if len(seconds) > 1 else "")
    return f"{text} ({calls}, {threads} thread{plural})"
