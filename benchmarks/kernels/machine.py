"""What this machine can do: sustained read bandwidth and peak of fused multiply-adds.

Both are measured with kernels built like the ones they judge, on the same threads.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm

from relax_llm_passes.kernels.cpu_build import (
    T,
    TensorSpec,
    build_kernel,
    i64,
    let,
    load,
    local,
    splat,
    store,
)
from relax_llm_passes.kernels.cpu_tiles import cpu_tiles
from relax_llm_passes.targets import parse_target

CPU = parse_target("native")
TILES = cpu_tiles(CPU)
# Eight streams a thread, as far apart as they are long: one stream alone gets two thirds of it.
_PARTS, _VECTORS, _STREAMS, _ROUNDS, _CHAINS = 64, 32 * 1024, 8, 4000, 12


def _reader(buffers: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    lanes = TILES.lanes
    with T.parallel(i64(0), i64(_PARTS)) as part:
        acc = local(_STREAMS * lanes)
        for s in range(_STREAMS):
            store(acc, splat(0.0, lanes), s * lanes, lanes)
        start = let(part * (_VECTORS * _STREAMS * lanes))
        with T.serial(i64(0), i64(_VECTORS)) as v:
            for s in range(_STREAMS):
                value = load(buffers["x"], start + (s * _VECTORS + v) * lanes, lanes)
                store(acc, load(acc, s * lanes, lanes) + value, s * lanes, lanes)
        for s in range(_STREAMS):
            store(
                buffers["out"],
                load(acc, s * lanes, lanes),
                (part * _STREAMS + s) * lanes,
                lanes,
            )


def _multiplier(buffers: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    lanes = TILES.lanes
    with T.parallel(i64(0), i64(_PARTS)) as part:
        acc = local(_CHAINS * lanes)
        factor = let(load(buffers["x"], 0, lanes))
        for c in range(_CHAINS):
            store(acc, splat(float(c), lanes), c * lanes, lanes)
        with T.serial(i64(0), i64(_ROUNDS)):
            for c in range(_CHAINS):
                store(acc, load(acc, c * lanes, lanes) * factor + factor, c * lanes, lanes)
        for c in range(_CHAINS):
            at = (part * _CHAINS + c) * lanes
            store(buffers["out"], load(acc, c * lanes, lanes), at, lanes)


def _time(name: str, body: Callable[..., None], size: int, out: int, repeat: int) -> float:
    kernel = build_kernel(
        name,
        [TensorSpec("x", (size,), "float32")],
        [TensorSpec("out", (out,), "float32")],
        body,
    )
    run = tvm.compile(kernel, target=CPU)[name]
    x = tvm.runtime.tensor(np.full(size, 0.5, "float32"))
    result = tvm.runtime.tensor(np.zeros(out, "float32"))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run(x, result)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@functools.cache
def read_bandwidth() -> float:
    """Return the sustained read bandwidth in GB/s: 256 MB and more, again and again."""
    size = _PARTS * _VECTORS * _STREAMS * TILES.lanes
    seconds = _time("read_all", _reader, size, _PARTS * _STREAMS * TILES.lanes, 12)
    return 4 * size / seconds / 1e9


@functools.cache
def peak_gflops() -> float:
    """Return the peak of fp32 multiply-adds in GFLOP/s."""
    lanes = TILES.lanes
    seconds = _time("multiply_add", _multiplier, lanes, _PARTS * _CHAINS * lanes, 12)
    return 2 * _PARTS * _ROUNDS * _CHAINS * lanes / seconds / 1e9
