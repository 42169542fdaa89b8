"""What the commands share: errors in one line, progress, and the options of a compilation."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import InputError, RelaxLLMError

if TYPE_CHECKING:
    from ..module_io import ModuleFile

__all__ = [
    "STAGE",
    "CompileFailure",
    "Parser",
    "Progress",
    "add_pipeline_arguments",
    "add_target_argument",
    "fail",
    "load",
    "make_pipeline",
    "parse_sizes",
    "prepare_folder",
    "set_threads",
    "show_warnings_as_lines",
    "write_text",
]


class CompileFailure(RelaxLLMError):
    """TVM could not compile a module that looks valid."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def one_line(error: BaseException) -> str:
    """Return an error's text as one line: ours as it is, others' with their type."""
    text = " ".join(str(error).split())
    if isinstance(error, RelaxLLMError):
        return text
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return f"{type(error).__name__}: {last}" if last else type(error).__name__


def fail(error: BaseException, code: int) -> int:
    """Print an error as one line on stderr and return `code`."""
    hint = "" if isinstance(error, RelaxLLMError) else " (--debug shows where)"
    print(f"relax-llm-passes: {one_line(error)}{hint}", file=sys.stderr)
    return code


def warn(text: str) -> None:
    """Print a warning as one line on stderr."""
    print(f"relax-llm-passes: warning: {' '.join(text.split())}", file=sys.stderr)


def show_warnings_as_lines() -> None:
    """Print Python warnings as one line each, without source code."""

    def show(message: Any, category: type[Warning], *_rest: Any, **_more: Any) -> None:
        quiet = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
        if not issubclass(category, quiet):  # addressed to programmers
            warn(str(message))

    warnings.showwarning = show


# Begins lines in a supervised child's log that say what it was about to do.
STAGE = "relax-llm-passes: stage: "

# In a supervised child, file descriptor 2 is a log that the parent reads, and sys.stderr is not.
SUPERVISED = False


def note_stage(text: str) -> None:
    """Leave what is going on where a supervising parent finds it after a crash."""
    if SUPERVISED:
        with contextlib.suppress(OSError):
            os.write(2, f"{STAGE}{text}\n".encode())


class Progress:
    """A line on stderr that says what is going on; nothing where stderr is no terminal."""

    def __init__(self, total: int = 0) -> None:
        self.on = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.color = self.on and not os.environ.get("NO_COLOR")
        self.total = total
        self.done = 0

    def __call__(self, text: str) -> None:
        """Replace the line."""
        note_stage(text)
        if not self.on:
            return
        self.done += 1
        count = f"[{self.done}/{self.total}] " if self.total else ""
        line = f"{count}{text}"[: _width() - 1]
        shown = f"\x1b[2m{line}\x1b[0m" if self.color else line
        # Without escape codes the rest of a longer line is blanked by hand.
        clear = "\r\x1b[K" if self.color else "\r" + " " * (_width() - 1) + "\r"
        print(f"{clear}{shown}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line, before something else is printed."""
        if self.on:
            clear = "\r\x1b[K" if self.color else "\r" + " " * (_width() - 1) + "\r"
            print(clear, end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.clear()


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


@contextlib.contextmanager
def quiet_on_error() -> Iterator[None]:
    """Hold back what C++ prints on stderr; print it only when the block succeeds.

    TVM logs about objects that an error leaves half-built, which would hide the one line that
    says what is wrong.
    """
    try:
        stderr = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # replaced by something that is no file
        yield
        return
    if SUPERVISED:  # the parent does that
        try:
            yield
        finally:
            gc.collect()
        return
    sys.stderr.flush()
    saved = os.dup(stderr)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), stderr)
        good = False
        try:
            yield
            good = True
        finally:
            if not good:
                gc.collect()
            os.dup2(saved, stderr)
            os.close(saved)
            if good:
                held.seek(0)
                sys.stderr.write(held.read().decode("utf-8", "replace"))


def load(path: str) -> ModuleFile:
    """Read a module and warn of known importer faults."""
    from ..module_io import read_module

    with quiet_on_error():
        file = read_module(path)
    for text in file.warnings:
        warn(f"{path}: {text}")
    return file


def add_target_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--target`."""
    parser.add_argument(
        "--target",
        default="native",
        metavar="TARGET",
        help="native, llvm, cuda, a kind with flags ('cuda -arch=sm_90'), JSON, or libraries "
        "before the target ('cublas, cuda'); default: native, this machine's processor",
    )


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which passes run and how."""
    group = parser.add_argument_group("passes")
    group.add_argument(
        "--passes",
        default="default",
        metavar="LIST",
        help="'default', 'default,-FuseOps', or names of passes and stages",
    )
    group.add_argument(
        "--disabled-pass", default="", metavar="A,B", help="names of passes that do not run"
    )
    group.add_argument(
        "--pass-config",
        action="append",
        default=[],
        metavar="PASS.OPTION=VALUE",
        help="an option of a pass; may be given several times",
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help="check the module after every pass, and every kernel against what it replaces",
    )


def disabled_passes(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names given with --disabled-pass."""
    return tuple(n.strip() for n in args.disabled_pass.split(",") if n.strip())


def make_pipeline(args: argparse.Namespace, progress: Progress | None = None, **more: Any) -> Any:
    """Return the pipeline that the command's options describe."""
    from ..pipeline import default_pipeline
    from ..spec import parse_pass_config

    return default_pipeline(
        args.target,
        passes=more.pop("passes", args.passes),
        options=parse_pass_config(args.pass_config),
        disabled=disabled_passes(args),
        verify=args.verify,
        progress=None if progress is None else lambda name: progress(f"running {name}"),
        **more,
    )


def parse_sizes(items: Sequence[str]) -> dict[str, int]:
    """Read `--shape n=16` texts (several in one, separated by commas, too)."""
    sizes: dict[str, int] = {}
    for item in (part for text in items for part in text.split(",")):
        name, equals, value = item.partition("=")
        if not equals or not name.strip() or not value.strip().isdigit() or int(value) < 1:
            raise InputError(f"--shape {item!r}: expected NAME=SIZE with a size of at least 1")
        sizes[name.strip()] = int(value)
    return sizes


# More than any machine has.
_MOST_THREADS = 1024


def set_threads(count: int | None) -> None:
    """Set how many threads TVM's runtime uses; call before TVM runs anything."""
    if count is None:
        return
    if count < 1:
        raise InputError(f"--threads {count}: expected at least 1")
    if count > _MOST_THREADS:  # TVM starts them all at once and they spin: nothing comes back
        raise InputError(f"--threads {count}: expected at most {_MOST_THREADS}")
    os.environ["TVM_NUM_THREADS"] = str(count)


def prepare_folder(path: str | Path, option: str) -> Path:
    """Make sure that a folder can be written to, before work starts; say so if it is new."""
    folder = Path(path)
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{option} {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"{option} {folder}: the folder cannot be written to")
    if new:
        print(f"relax-llm-passes: created the folder {folder}", file=sys.stderr)
    return folder


def write_text(path: str, text: str) -> None:
    """Write a file ("-" is stdout), with its folder; one clear error when that fails."""
    if path == "-":
        print(text)
        return
    prepare_folder(Path(path).parent, f"cannot write {path}:")
    try:
        Path(path).write_text(text if text.endswith("\n") else text + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
