"""Run with an installed wheel, from outside the source tree: compile and run a small module.

Not collected by pytest; `.ci/run` calls it with the Python of a fresh environment.
"""

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R


@I.ir_module
class Module:
    @R.function
    def main(
        x: R.Tensor(("n", 48), "float32"),
        w: R.Tensor((32, 48), "float32"),
        b: R.Tensor((32,), "float32"),
    ) -> R.Tensor(("n", 32), "float32"):
        with R.dataflow():
            wt = R.permute_dims(w)
            y = R.matmul(x, wt)
            z = R.add(y, b)
            out = R.nn.relu(z)
            R.output(out)
        return out


def main() -> None:
    # By name, with no import of the package: its entry point must be found.
    target = tvm.target.Target({"kind": "llvm"})
    executable = tvm.compile(Module, target, relax_pipeline="relax_llm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype("float32") for s in ((3, 48), (32, 48), (32,)))
    found = machine["main"](*[tvm.runtime.tensor(a) for a in (x, w, b)]).numpy()
    expected = np.maximum(x.astype("float64") @ w.T.astype("float64") + b, 0)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < 1e-5, error
    import relax_llm_passes

    assert "site-packages" in relax_llm_passes.__file__, relax_llm_passes.__file__
    print(f"wheel works: relative error {error:.1e}")


if __name__ == "__main__":
    main()
