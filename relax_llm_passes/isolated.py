"""Calls in a worker process that may crash: the caller gets a result, an error or "crashed".

TVM's default pipelines end the process on some inputs (segmentation faults, aborts in C++), so
whatever runs them for comparison runs them here. A worker is kept and used again, because
importing TVM takes seconds; one that dies or takes too long is replaced by a fresh one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from typing import IO, Any

__all__ = ["Outcome", "Worker"]


@dataclass(frozen=True)
class Outcome:
    """What became of a call.

    Attributes
    ----------
    status : str
        "ok", "failed" (an exception), "crashed" (the worker died) or "timeout".
    result : Any
        What the function returned, when `status` is "ok".
    message : str
        One line that says what went wrong.
    """

    status: str
    result: Any = None
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.status == "ok"

    def __str__(self) -> str:
        return self.status if self.ok or not self.message else f"{self.status}: {self.message}"


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


class Worker:
    """A process that calls functions of this package by name; use it as a context manager.

    Parameters
    ----------
    environment : dict, optional
        Variables set for the worker ("TVM_NUM_THREADS").

    Examples
    --------
    >>> with Worker() as worker:
    ...     outcome = worker.call("relax_llm_passes.checking:compile_upstream", {...}, 120)
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.Queue[bytes | None] = queue.Queue()
        self._stderr: IO[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._answers = queue.Queue()
        self._stderr = tempfile.TemporaryFile()
        process = subprocess.Popen(
            [sys.executable, "-m", "relax_llm_passes.isolated"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(_search_path())},
        )
        answers = self._answers
        stdout = process.stdout

        def read() -> None:
            assert stdout is not None
            for line in stdout:
                answers.put(line)
            answers.put(None)

        threading.Thread(target=read, daemon=True).start()
        self._process = process
        return process

    def call(
        self, function: str, arguments: dict[str, Any], timeout: float | None = None
    ) -> Outcome:
        """Call `module:function` with keyword arguments that JSON can carry.

        Parameters
        ----------
        function : str
            "package.module:name".
        arguments : dict
            Keyword arguments.
        timeout : float, optional
            Seconds after which the worker is ended.
        """
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._start()
        request = json.dumps({"function": function, "arguments": arguments}) + "\n"
        assert process.stdin is not None
        try:
            process.stdin.write(request.encode())
            process.stdin.flush()
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.close()
            return Outcome("timeout", message=f"took more than {timeout:g} s")
        except BrokenPipeError:
            line = None
        except BaseException:  # Ctrl-C: the worker must not stay behind
            self.close()
            raise
        if line is None:
            code = process.wait()
            last = self._last_words()
            self.close()
            return Outcome("crashed", message=_signal_name(code) + (f": {last}" if last else ""))
        answer = json.loads(line)
        return Outcome(answer["status"], answer.get("result"), answer.get("message", ""))

    def _last_words(self) -> str:
        """Return the last line the worker printed that is no part of a stack dump."""
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        text = self._stderr.read()[-20000:].decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "Check failed" in line]
        return told[-1][:300] if told else ""

    def close(self) -> None:
        """End the worker; the next call starts another."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    if stream is not None:
                        stream.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None


def _search_path() -> list[str]:
    """Return this process's module path, so that the worker finds the same packages."""
    return [p for p in sys.path if p]


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if len(lines) == 1 else (lines[-1] if lines else "")
    return f"{type(error).__name__}: {text}"[:400]


def _serve() -> None:
    """Answer requests on stdin, one JSON text a line, until it closes."""
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["function"].partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            answer = {"status": "ok", "result": function(**request["arguments"])}
            text = json.dumps(answer)
        except Exception as error:
            traceback.print_exc()
            text = json.dumps({"status": "failed", "message": _one_line(error)})
        answers.write(text + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
