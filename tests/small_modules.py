"""Small modules that several tests share."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

TEXT = """from tvm.script import ir as I
from tvm.script import relax as R

WIDTH = 5

@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("n", WIDTH), "float32"), w: R.Tensor((WIDTH, 7), "float32")):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.nn.relu(a)
            c = R.nn.relu(R.add(b, b))
            R.output(c)
        return c

    @R.function
    def second(x: R.Tensor((3, "k * 2"), "float32"), s: R.Shape(["k"])):
        return R.exp(x)
"""


@I.ir_module
class Alias:
    @R.function
    def main(x: R.Tensor(("n", 5), "float32"), w: R.Tensor((5, 7), "float32")):
        with R.dataflow():
            a = R.matmul(x, w)
            b = a
            c = R.nn.relu(b)
            d = R.nn.relu(R.add(c, c))
            R.output(d)
        return d


@I.ir_module
class Relus:
    @R.function
    def main(x: R.Tensor(("n", 5), "float32")):
        with R.dataflow():
            a = R.nn.relu(x)
            b = R.nn.relu(R.subtract(a, R.const(1.0)))
            R.output(b)
        return b


def expected(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What `Alias` computes."""
    return 2 * np.maximum(x.astype("float64") @ w.astype("float64"), 0)


def call(executable, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Run `Alias` on the CPU."""
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w)).numpy()


def inputs(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random arguments of `Alias`."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((n, 5)).astype("float32"),
        rng.standard_normal((5, 7)).astype("float32"),
    )
