"""Execute TVM's CUDA code on the CPU: install, configure, run, report."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import InputError, RelaxLLMError
from .build import build_kernels
from .checks import choose_checks, settings
from .counters import Finding, LaunchStats, parse_findings, parse_launches
from .preload import driver

__all__ = ["CheckError", "Config", "RunResult", "configure", "cuda_target", "findings", "install",
           "launches", "run_module", "run_primfunc"]  # fmt: skip

Choice = bool | str | Iterable[str]  # of checks

_MAGIC = b"RELAXLLM-CUDA-SOURCE\n"
_ORDERS = {"ascending": 0, "descending": 1, "random": 2}


class CheckError(RelaxLLMError):
    """A check found something, or the results differ between thread orders."""


@dataclass(frozen=True)
class Config:
    """How launches are executed.

    Attributes
    ----------
    order : str
        Of threads and blocks: "ascending", "descending" or "random" by ``seed``.
    seed : int
        Of the random order.
    checks : bool
        Run the instrumented build, which sees every load and store: alignment, byte counts.
    bounds, races, uninitialised : bool
        With checks: look for accesses outside of memory, data races, reads of shared memory that
        nobody wrote. What would end the process is always found.
    access_groups : bool
        With checks: count sectors, bank conflicts and lanes.
    poison : bool
        Memory that nobody wrote reads as NaN, else as zero.
    divergence : bool
        Barriers and warp operations that some of their threads do not reach are findings.
    lockstep : bool
        Run volatile accesses in warp lockstep, as GPUs before Volta did; implies checks. Code that
        needs it is wrong on newer GPUs.
    max_shared_bytes : int
        Shared memory a block may use: 166912 on sm_80, 232448 on sm_90 and sm_100.
    """

    order: str = "ascending"
    seed: int = 1
    checks: bool = False
    bounds: bool = True
    races: bool = True
    uninitialised: bool = True
    access_groups: bool = True
    poison: bool = True
    divergence: bool = True
    lockstep: bool = False
    max_shared_bytes: int = 232448


_BUILD = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
_kept: list[Any] = []  # what C++ holds pointers to


def _build_callback(lib: ctypes.CDLL) -> Any:
    def build(source: bytes, checked: int) -> int | None:
        try:
            header, _, code = source.decode().partition("\n")
            path = build_kernels(code, bool(checked), int(header))
        except Exception as e:  # it crosses C++: leave the text, not the exception
            lib.emu_set_build_error(str(e).encode())
            return None
        text = ctypes.create_string_buffer(str(path).encode())
        _kept.append(text)
        return ctypes.addressof(text)

    return _BUILD(build)


def _arch_of_target() -> int:
    """``__CUDA_ARCH__`` of the target being compiled for; 900 when it does not say."""
    import tvm

    target = tvm.target.Target.current(allow_none=True)
    arch = str(target.attrs.get("arch", "")) if target is not None else ""
    digits = "".join(c for c in arch.partition("_")[2] if c.isdigit())
    return int(digits) * 10 if digits else 900


@functools.cache
def install() -> None:
    """Emulate a CUDA device in this process, for good: ``tvm.cuda(0)`` runs on the CPU.

    TVM's compile callback is replaced: CUDA source stays source until its first launch, when it is
    translated and compiled with g++.

    Raises
    ------
    UnsupportedError
        Not possible on this machine (no g++, not x86-64 Linux) or in this process (a real CUDA
        driver is in use).
    """
    import tvm_ffi

    lib = driver()
    callback = _build_callback(lib)
    _kept.append(callback)
    lib.emu_set_build_function(callback)

    @tvm_ffi.register_global_func("tvm_callback_cuda_compile", override=True)
    def keep_source(code: str) -> bytes:
        return _MAGIC + f"{_arch_of_target()}\n{code}".encode() + b"\0"


def configure(config: Config | None = None, **changes: Any) -> Config:
    """Set how the next launches are executed; returns what is set.

    ``configure(order="random", seed=7, checks=True)`` changes single fields of the default.
    """
    config = replace(config or Config(), **changes)
    if config.order not in _ORDERS:
        raise InputError(f"order {config.order!r}: expected one of {sorted(_ORDERS)}")
    # As runtime/control.cc reads them.
    switches = (config.checks or config.lockstep, config.bounds, config.races,
                config.uninitialised, config.access_groups, config.poison, config.divergence,
                config.lockstep)  # fmt: skip
    bits = sum(on << i for i, on in enumerate(switches))
    driver().emu_configure(_ORDERS[config.order], config.seed, bits, config.max_shared_bytes)
    return config


def findings() -> list[Finding]:
    """What the checks found since the last call."""
    return parse_findings(driver().emu_take_findings().decode())


def launches() -> list[LaunchStats]:
    """Counters of every launch since the last call."""
    return parse_launches(driver().emu_take_launches().decode())


def cuda_target(arch: str = "sm_90") -> Any:
    """The CUDA target that tests use, with an llvm host."""
    import tvm

    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        },
        host="llvm",
    )


@dataclass
class RunResult:
    """Outputs of a run, what the checks found, and one row of counters per launch.

    Unpacks as ``outputs, report, stats = result``.
    """

    outputs: list[np.ndarray]
    report: list[Finding] = field(default_factory=list)
    stats: list[LaunchStats] = field(default_factory=list)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.outputs, self.report, self.stats))


def _orders(n: int) -> list[tuple[str, int]]:
    fixed = [("ascending", 1), ("descending", 1)]
    return (fixed + [("random", seed) for seed in range(1, max(1, n - 1))])[: max(1, n)]


def _flatten(value: Any) -> list[Any]:
    if value is None:
        return []
    if hasattr(value, "numpy"):
        return [value]
    if isinstance(value, (list, tuple)) or hasattr(value, "__len__"):
        return [x for v in value for x in _flatten(v)]
    return [value]


def _to_numpy(value: Any) -> np.ndarray:
    return np.array(value.numpy()) if hasattr(value, "numpy") else np.asarray(value)


def _device_arguments(inputs: Sequence[Any]) -> list[Any]:
    import tvm

    device = tvm.cuda(0)

    def move(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(move(v) for v in x)
        if isinstance(x, np.ndarray):
            return tvm.runtime.tensor(x, device)
        return x

    return [move(x) for x in inputs]


def _raise_on(found: list[Finding]) -> None:
    if found:
        raise CheckError("\n".join(str(f) for f in found[:20]))


def _different(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape != b.shape or a.tobytes() != b.tobytes()


def _run_in_orders(
    run: Any, orders: int, checks: Choice, strict: bool, config: Mapping[str, Any]
) -> RunResult:
    """Run once per order; the first run carries the checks and counters."""
    result = RunResult([])
    names = choose_checks(checks)
    for i, (order, seed) in enumerate(_orders(orders if "order" in names else 1)):
        chosen = settings(names) | {"order": order, "seed": seed}
        configure(**{**chosen, "checks": chosen["checks"] and i == 0, **config})
        findings(), launches()
        try:
            outputs = [_to_numpy(v) for v in _flatten(run())]
        except Exception as e:
            found = findings()
            if found:
                raise CheckError(
                    "\n".join(str(f) for f in found[:20]) + f"\nthe launch failed: {e}"
                ) from e
            raise
        found = findings()
        if strict:
            _raise_on(found)
        if i == 0:
            result = RunResult(outputs, found, launches())
            continue
        result.report += found
        for n, (a, b) in enumerate(zip(result.outputs, outputs, strict=True)):
            if _different(a, b):
                text = f"output {n} differs in thread order {order}, seed {seed}"
                if strict:
                    raise CheckError(text)
                result.report.append(Finding("order", "", text))
    configure()
    return result


def run_module(
    mod: Any,
    inputs: Sequence[Any],
    target: Any = None,
    *,
    function: str = "main",
    relax_pipeline: Any = None,
    orders: int = 5,
    checks: Choice = True,
    strict: bool = True,
    **config: Any,
) -> RunResult:
    """Compile a Relax module for CUDA and execute it on the CPU.

    Parameters
    ----------
    mod : tvm.IRModule or compiled executable
        With a Relax function named ``function``.
    inputs : sequence
        NumPy arrays (moved to the device), nested lists or tuples of them, or anything else that
        the VM takes. For bf16 use ``ml_dtypes.bfloat16`` arrays.
    target : tvm.target.Target, optional
        A CUDA target; default sm_90.
    relax_pipeline : optional
        What ``tvm.compile`` takes; default TVM's pipeline for the target.
    orders : int
        Number of thread orders: ascending, descending, then random ones. Outputs must be equal
        bit by bit (not so for kernels that add floats with atomics: use ``orders=1``).
    checks : bool, str or iterable of str
        True: all (or those that the test's marker, pytest's option or the environment name; see
        ``checks.py``), the first order in an instrumented build. False: the plain build only.
        Names with commas: "races,bounds", "-order", "none".
    strict : bool
        Raise on the first finding; else they are in the result's ``report``.
    **config
        Fields of :class:`Config`.

    Returns
    -------
    RunResult
        ``outputs`` (list of arrays), ``report`` (findings), ``stats`` (one per launch of the first
        order).

    Raises
    ------
    CheckError
        A check found something, or the outputs depend on the thread order.
    """
    import tvm
    from tvm import relax

    install()
    target = target or cuda_target()
    executable = mod
    if isinstance(mod, tvm.IRModule):
        pipeline = relax_pipeline or relax.get_default_pipeline(target)
        executable = tvm.compile(mod, target, relax_pipeline=pipeline)
    # Without the pool every tensor has its own allocation, whose ends are checked.
    vm = relax.VirtualMachine(executable, tvm.cuda(0), memory_cfg="naive")

    def run() -> Any:
        return vm[function](*_device_arguments(inputs))

    return _run_in_orders(run, orders, checks, strict, config)


def run_primfunc(
    func: Any,
    inputs: Sequence[Any],
    outputs: Sequence[int] | int = 1,
    target: Any = None,
    *,
    orders: int = 5,
    checks: Choice = True,
    strict: bool = True,
    **config: Any,
) -> RunResult:
    """Compile a scheduled PrimFunc for CUDA and execute it on the CPU.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc or tvm.IRModule
        Bound to threads already; a module must hold one PrimFunc.
    inputs : sequence
        All arguments in order, outputs included: NumPy arrays (give outputs any content, they
        should be overwritten) and scalars for symbolic sizes.
    outputs : int or sequence of int
        How many of the last arguments are outputs, or the indices of the outputs.
    target, orders, checks, strict, **config
        As in :func:`run_module`.

    Returns
    -------
    RunResult
        The output arguments after the call.
    """
    import tvm

    install()
    target = target or cuda_target()
    mod = func if isinstance(func, tvm.IRModule) else tvm.IRModule({"main": func})
    names = [g.name_hint for g in mod.get_global_vars()]
    if len(names) != 1:
        raise InputError(f"run_primfunc takes one PrimFunc, the module has {sorted(names)}")
    if not isinstance(func, tvm.IRModule):
        mod = tvm.IRModule({names[0]: func.with_attr("global_symbol", names[0])})
    with target:
        library = tvm.tirx.build(mod, target=target)
    arrays = [i for i, x in enumerate(inputs) if isinstance(x, np.ndarray)]
    chosen = arrays[-outputs:] if isinstance(outputs, int) else list(outputs)

    def run() -> Any:
        arguments = _device_arguments(inputs)
        library[names[0]](*arguments)
        return [arguments[i] for i in chosen]

    return _run_in_orders(run, orders, checks, strict, config)
