"""Compiler passes for language models on Apache TVM Relax.

>>> import relax_llm_passes, tvm
>>> seq = relax_llm_passes.default_pipeline("native")
>>> ex = tvm.compile(mod, seq.target, relax_pipeline=seq)
>>> print(seq.report.to_text())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import report
    from .errors import InputError, RelaxLLMError, UnknownNameError, UnsupportedError
    from .fusion.partition_byoc import partition_for_cublas, partition_for_cutlass
    from .libraries import Library, list_libraries, register_library
    from .lower import Accept, Composite, register_implementation
    from .pipeline import default_pipeline, stages
    from .registry import PassRun, get_pass, list_passes, register_pass
    from .report import Refusal, Report
    from .targets import parse_target

__version__ = "0.1.0"

# Public names by module. They are imported on first use: TVM imports this package at `import tvm`
# (for relax_pipeline="relax_llm"), when most of TVM is not there yet and nobody has asked for us.
_HOME = {
    "Accept": "lower",
    "Composite": "lower",
    "InputError": "errors",
    "Library": "libraries",
    "PassRun": "registry",
    "Refusal": "report",
    "RelaxLLMError": "errors",
    "Report": "report",
    "UnknownNameError": "errors",
    "UnsupportedError": "errors",
    "default_pipeline": "pipeline",
    "get_pass": "registry",
    "list_libraries": "libraries",
    "list_passes": "registry",
    "parse_target": "targets",
    "partition_for_cublas": "fusion.partition_byoc",
    "partition_for_cutlass": "fusion.partition_byoc",
    "register_implementation": "lower",
    "register_library": "libraries",
    "register_pass": "registry",
    "report": "",
    "stages": "pipeline",
}

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
    "partition_for_cublas",
    "partition_for_cutlass",
    "register_implementation",
    "register_library",
    "register_pass",
    "report",
    "stages",
]

_CHECKED = False


def __getattr__(name: str) -> Any:
    global _CHECKED
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _CHECKED:
        _CHECKED = True
        from .environment import check_import

        check_import()
    home = _HOME[name]
    if not home:
        return importlib.import_module(f"{__name__}.{name}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
