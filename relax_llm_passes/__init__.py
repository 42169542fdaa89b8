"""Compiler passes for language models on Apache TVM Relax.

>>> import relax_llm_passes, tvm
>>> seq = relax_llm_passes.default_pipeline("native")
>>> ex = tvm.compile(mod, seq.target, relax_pipeline=seq)
>>> print(seq.report.to_text())
"""

from __future__ import annotations

from .environment import check_import as _check_import

_check_import()

from . import report  # noqa: E402  (the check above must come before TVM is imported)
from .errors import InputError, RelaxLLMError, UnknownNameError, UnsupportedError  # noqa: E402
from .libraries import Library, list_libraries, register_library  # noqa: E402
from .lower import Accept, Composite, register_implementation  # noqa: E402
from .pipeline import default_pipeline, stages  # noqa: E402
from .registry import PassRun, get_pass, list_passes, register_pass  # noqa: E402
from .report import Refusal, Report  # noqa: E402
from .targets import parse_target  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Accept",
    "Composite",
    "InputError",
    "Library",
    "PassRun",
    "Refusal",
    "RelaxLLMError",
    "Report",
    "UnknownNameError",
    "UnsupportedError",
    "default_pipeline",
    "get_pass",
    "list_libraries",
    "list_passes",
    "parse_target",
    "register_implementation",
    "register_library",
    "register_pass",
    "report",
    "stages",
]
