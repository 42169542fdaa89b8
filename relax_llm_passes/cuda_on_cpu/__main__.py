"""Run a Python program as if this machine had a GPU.

    python -m relax_llm_passes.cuda_on_cpu [--checks NAMES] PROGRAM [ARGUMENT ...]

The program finds a CUDA device whose kernels execute on the CPU. Only modules that were compiled
with the device emulated run on it (their CUDA source is inside); cubins do not. With --checks (or
the variable RELAX_LLM_CUDA_CHECKS) what the checks find is printed at the end, and is exit code 1.
"""

from __future__ import annotations

import os
import runpy
import sys

from ..errors import InputError


def main() -> int:
    """Install the device and run the program with its arguments."""
    from .checks import VARIABLE, choose_checks, settings

    arguments = sys.argv[1:]
    which = os.environ.get(VARIABLE) or ""
    if arguments and arguments[0] == "--checks" and len(arguments) > 1:
        which, arguments = arguments[1], arguments[2:]
    elif arguments and arguments[0].startswith("--checks="):
        which, arguments = arguments[0].partition("=")[2], arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        names = choose_checks(which or False)
    except InputError as e:
        print(e, file=sys.stderr)
        return 2
    from .harness import configure, findings, install

    install()
    configure(**settings(names))
    sys.argv = arguments
    code: object = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:  # what was found is said all the same
        code = e.code
    found = findings()
    for f in found:
        print(f, file=sys.stderr)
    if isinstance(code, str):
        print(code, file=sys.stderr)
    status = code if isinstance(code, int) else int(code is not None)
    return status or int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
