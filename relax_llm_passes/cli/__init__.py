"""The command line: relax-llm-passes list | compile | run | check | explain | extract.

Exit codes: 0 good, 1 a check failed or TVM could not compile, 2 the input cannot be used,
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from .common import CompileFailure, Parser, fail, show_warnings_as_lines

__all__ = ["main", "parse"]

# One module a command, in the order of the help text.
_COMMANDS = ("list", "compile", "run", "check", "explain", "extract")


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = Parser(
        prog="relax-llm-passes",
        description="Compile language models written in TVM Relax well, and say what was done.",
    )
    parser.add_argument("--version", action="version", version=f"relax-llm-passes {__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show the Python traceback of an error"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name in _COMMANDS:
        module = importlib.import_module(f".{name}_command", __package__)
        text = (module.__doc__ or name).strip().splitlines()[0]
        sub = commands.add_parser(name, help=text[0].lower() + text[1:], description=text)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
        # Also after the command; the default must not undo one given before it.
        sub.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    return parser


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace | None, int]:
    """Return the options, or None and the exit code where argparse has said all there is."""
    try:
        return _parser().parse_args(argv), 0
    except SystemExit as stop:
        return None, int(stop.code or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line in this process and return its exit code.

    A crash of TVM ends this process; the installed program runs it in a child (`supervise.entry`).

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; `sys.argv` by default.
    """
    args, code = parse(argv)
    if args is None:
        return code
    if args.command is None:
        parser = _parser()
        parser.print_help()
        return 2
    show_warnings_as_lines()
    try:
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            traceback.print_exc()
            return _code(error)
        return fail(error, _code(error))


def _code(error: Exception) -> int:
    from ..errors import RelaxLLMError

    if isinstance(error, CompileFailure) or not isinstance(error, RelaxLLMError):
        return 1
    return 2
