"""Run a Python program as if this machine had a GPU.

    python -m relax_llm_passes.cuda_on_cpu PROGRAM [ARGUMENT ...]

The program finds a CUDA device whose kernels execute on the CPU. Only modules that were compiled
with the device emulated run on it (their CUDA source is inside); cubins do not.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Install the device and run the program with its arguments."""
    if len(sys.argv) < 2:
        print(__doc__.strip(), file=sys.stderr)
        sys.exit(2)
    from .harness import install

    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
