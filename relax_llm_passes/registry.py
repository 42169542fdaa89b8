"""Passes by name: registration, lookup with typed options, and use of other people's packages.

A pass is a function `(mod, run) -> mod`. Registering it gives a factory of TVM passes, so that
`PassContext(disabled_pass=[...])`, instruments and pass timing see it under its own name. All are
registered at opt_level 0: TVM drops passes of a higher level in silence.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi

from . import options as _options
from . import report as _report
from .errors import InputError, RelaxLLMError, UnknownNameError, UnsupportedError

__all__ = [
    "STAGES",
    "PassFactory",
    "PassRun",
    "get_pass",
    "list_passes",
    "load_plugins",
    "lookup",
    "register_pass",
]

# A pass runs behind TVM's FFI, which turns exceptions that it does not know into RuntimeError.
for _error in (RelaxLLMError, InputError, UnsupportedError, UnknownNameError):
    tvm_ffi.register_error(_error.__name__, _error)

# In the order in which default_pipeline runs them.
STAGES = ("clean", "raise", "fuse", "lower", "schedule", "finish", "optional")

PLUGIN_GROUP = "relax_llm_passes.plugins"


@dataclass
class PassRun:
    """What a pass is given beside the module.

    Attributes
    ----------
    options : Any
        The frozen options dataclass the pass was registered with.
    target : tvm.target.Target | None
        The pipeline's target, else `Target.current()`, else None.
    record : PassRecord
        Where matches, refusals and notes go.
    """

    options: Any
    target: tvm.target.Target | None
    record: _report.PassRecord


@dataclass
class PassFactory:
    """A registered pass. Calling it with options gives a `tvm.transform.Pass`."""

    name: str
    stage: str
    function: Callable[[tvm.IRModule, PassRun], tvm.IRModule]
    options_type: type = _options.NoOptions
    fuses: bool = False
    origin: str = ""
    __doc__: str | None = field(default=None, repr=False)

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (self.__doc__ or "").strip().splitlines()[0] if self.__doc__ else ""

    def __call__(self, **values: Any) -> tvm.transform.Pass:
        """Return the TVM pass, with options given by keyword."""
        opts = _options.make(self.name, self.options_type, values)

        def transform(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
            return self.run(mod, opts)

        return tvm.transform.module_pass(transform, opt_level=0, name=self.name)

    def run(self, mod: tvm.IRModule, opts: Any = None) -> tvm.IRModule:
        """Run the pass on `mod`, writing a record to the report being collected (if any)."""
        record = _report.PassRecord(self.name, fuses=self.fuses)
        report = _report.current()
        if report is not None:
            report.add(record)
        target = tvm.target.Target.current(allow_none=True)
        start = time.perf_counter()
        try:
            return self.function(
                mod, PassRun(self.options_type() if opts is None else opts, target, record)
            )
        finally:
            record.seconds = time.perf_counter() - start


_PASSES: dict[str, PassFactory] = {}
_BUILTIN_LOADED = False
_PLUGINS_LOADED = False


def register_pass(
    name: str, *, stage: str, options: type = _options.NoOptions, fuses: bool | None = None
) -> Callable[[Callable[[tvm.IRModule, PassRun], tvm.IRModule]], PassFactory]:
    """Register a pass under `name`.

    Parameters
    ----------
    name : str
        The name in pipelines, on the command line and in `PassContext(disabled_pass=...)`.
    stage : str
        One of `STAGES`; "optional" passes run only when asked for.
    options : type
        A frozen dataclass; each field is an option with its type and default.
    fuses : bool, optional
        Whether a run that matches nothing is worth a word. Default: true in stages "raise" and
        "fuse".

    Raises
    ------
    InputError
        When another package has the name already. Registering again from the same place (a
        re-import) replaces the entry.
    """
    if stage not in STAGES:
        raise UnknownNameError("stage", stage, STAGES)

    def decorate(function: Callable[[tvm.IRModule, PassRun], tvm.IRModule]) -> PassFactory:
        origin = f"{function.__module__}.{function.__qualname__}"
        known = _PASSES.get(name)
        if known is not None and known.origin != origin:
            raise InputError(f"pass {name!r} is registered by {known.origin}; {origin} cannot too")
        factory = PassFactory(
            name,
            stage,
            function,
            options,
            stage in ("raise", "fuse") if fuses is None else fuses,
            origin,
            function.__doc__,
        )
        _PASSES[name] = factory
        return factory

    return decorate


def _load_builtin() -> None:
    global _BUILTIN_LOADED
    if not _BUILTIN_LOADED:
        _BUILTIN_LOADED = True  # Before the import: what it imports may ask for passes.
        try:
            importlib.import_module("relax_llm_passes.passes")
        except BaseException:
            _BUILTIN_LOADED = False
            raise


def load_plugins() -> None:
    """Import the packages that declare an entry point in the group "relax_llm_passes.plugins".

    Each entry point is a function without arguments that registers passes, libraries and
    implementations. One that fails is reported as a warning and left out.
    """
    global _PLUGINS_LOADED
    if _PLUGINS_LOADED:
        return
    _PLUGINS_LOADED = True
    _load_builtin()
    for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        try:
            entry.load()()
        except Exception as error:
            warnings.warn(
                f"relax_llm_passes plugin {entry.name!r} ({entry.value}) failed and is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


def lookup(name: str) -> PassFactory:
    """Return the registered pass called `name`.

    Raises
    ------
    UnknownNameError
        With the closest registered name.
    """
    load_plugins()
    if not isinstance(name, str):
        raise InputError(f"pass {name!r}: expected a name, as list_passes() gives them")
    if name not in _PASSES:
        raise UnknownNameError("pass", name, _PASSES)
    return _PASSES[name]


def get_pass(name: str, **values: Any) -> tvm.transform.Pass:
    """Return the TVM pass called `name`, with options by keyword."""
    return lookup(name)(**values)


def list_passes() -> list[PassFactory]:
    """Return every registered pass, by stage and then in order of registration."""
    load_plugins()
    return sorted(_PASSES.values(), key=lambda p: STAGES.index(p.stage))
