"""The installed program: each command that runs TVM is a child process, watched by a small parent.

TVM can end its process on some inputs (an abort in C++, a segmentation fault, an instruction that
this processor does not have). The parent turns that into one line and an exit code. The child
writes what people read to the real stderr; what C++ prints on its own goes to a file, of which the
parent shows the telling line after a crash and everything after a success.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from . import common, main, parse
from .common import STAGE

__all__ = ["entry"]

_STDERR = "RELAX_LLM_PASSES_STDERR"

_WHY = {
    "SIGKILL": "the system ended the process, most likely because memory ran out",
    "SIGILL": "the code uses an instruction that this processor does not have",
    "SIGSEGV": "TVM crashed (segmentation fault)",
    "SIGABRT": "TVM aborted",
    "SIGBUS": "TVM crashed (bus error)",
    "SIGFPE": "TVM crashed (arithmetic error)",
}

# Lines that C++ prints on the way and that tell people nothing.
_NOISE = ("Fast mode segfaults when there are out-of-bounds indices",)


def entry(argv: Sequence[str] | None = None) -> int:
    """Run the command line in a child process and return its exit code.

    `relax-llm-passes` and `python -m relax_llm_passes` come here. Options are read first, so that a
    mistyped one is told at once; commands that compile and run nothing stay in this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args, code = parse(arguments)
    if args is None:
        return code
    if args.command in (None, "list"):
        return main(arguments)
    with tempfile.TemporaryFile() as noise:
        return _run(arguments, args.command, noise, args.debug)


def _run(arguments: list[str], command: str, noise: IO[bytes], debug: bool) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        real = os.dup(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # no stderr: nothing to keep apart
        return main(arguments)
    search = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen(
        [sys.executable, "-m", "relax_llm_passes.cli.supervise", *arguments],
        stderr=noise,
        pass_fds=[real],
        env={**os.environ, "PYTHONPATH": search, _STDERR: str(real)},
    )
    os.close(real)
    # Ctrl-C reaches both; the child says "interrupted" and the parent waits for it.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.signal(signal.SIGTERM, stop)
    noise.seek(0)
    text = noise.read().decode("utf-8", "replace")
    stages = [line for line in text.splitlines() if line.startswith(STAGE)]
    shown = [line for line in text.splitlines() if line not in stages]
    if code == -signal.SIGTERM:
        return 128 + signal.SIGTERM
    if code >= 0:
        if code == 0 or debug:
            for line in shown:
                if line.strip() and not any(n in line for n in _NOISE):
                    print(line, file=sys.stderr)
        return code
    if debug:
        print("\n".join(shown), file=sys.stderr)
    print(f"relax-llm-passes: {_told(code, command, stages, shown)}", file=sys.stderr)
    return 1


def _told(code: int, command: str, stages: list[str], lines: list[str]) -> str:
    """Return the line that says how the child ended, and where."""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = _WHY.get(name, f"the process was ended by {name}")
    told = [line.strip() for line in lines if "Error" in line or "Check failed" in line]
    reason = f": {told[-1][:200]}" if told else ""
    where = f" while {stages[-1][len(STAGE) :].strip()}" if stages else ""
    hint = "" if name == "SIGKILL" else " (--debug shows what it printed)"
    return f"{command} failed{where}: {why}{reason}{hint}"


def _child() -> int:
    """Run the command line with Python's stderr on the real one and C++'s on the parent's file."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # do not outlive the parent (Linux)
    place = os.environ.pop(_STDERR, "")
    if place:
        # Line buffered: a crash must not lose what has been said.
        sys.stderr = os.fdopen(int(place), "w", buffering=1)
        os.set_inheritable(int(place), False)
        common.SUPERVISED = True
    return main()


if __name__ == "__main__":
    sys.exit(_child())
