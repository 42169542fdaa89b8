"""Targets: from any spelling to a `tvm.target.Target`, and the facts kernels ask of it.

TVM 0.27 takes targets as dictionaries only. This module also takes tvmc's spellings: a kind with
flags ("cuda -arch=sm_90"), JSON text, a tag ("nvidia/nvidia-h100"), "native" for the machine it
runs on, and libraries by name before the target ("cublas, cuda -arch=sm_90").
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any, TypeAlias

import tvm
from tvm.target import Target
from tvm.target import codegen as llvm

from .errors import InputError, UnknownNameError

__all__ = [
    "SUPPORTED_KINDS",
    "attribute",
    "num_threads",
    "parse_target",
    "split_libraries",
    "vector_bits",
    "vector_lanes",
    "vector_registers",
]

SUPPORTED_KINDS = ("llvm", "cuda")

# What dlight's rules and this package's kernels read; a plain "cuda" has none of them.
_CUDA_DEFAULTS: dict[str, Any] = {
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}

# Compiled for when neither the caller nor a device in this machine says otherwise.
_DEFAULT_ARCH = "sm_80"

TargetLike: TypeAlias = "str | Mapping[str, Any] | Target"


def _host_llvm() -> dict[str, Any]:
    get_cpu = tvm.get_global_func("target.llvm_get_system_cpu", allow_missing=True)
    config: dict[str, Any] = {"kind": "llvm"}
    if get_cpu is not None:
        config["mcpu"] = str(get_cpu())
    config["num-cores"] = os.cpu_count() or 1
    return config


def _present_arch() -> str:
    device = tvm.cuda(0)
    if device.exist:
        return "sm_" + str(device.compute_version).replace(".", "")
    return _DEFAULT_ARCH


def _value(text: str) -> Any:
    if text.lstrip("-").isdigit():
        return int(text)
    return text


def _from_flags(text: str) -> dict[str, Any]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"target {text!r}: {error}") from None
    config: dict[str, Any] = {"kind": words[0]}
    for word in words[1:]:
        if not word.startswith("-") or "=" not in word:
            raise InputError(f"target {text!r}: expected -name=value, found {word!r}")
        name, _, value = word.lstrip("-").partition("=")
        config[name] = value.split(",") if name in ("mattr", "keys") else _value(value)
    return config


def _check_arch(config: Mapping[str, Any]) -> None:
    """Refuse what nvcc would refuse, after minutes."""
    arch = config["arch"]
    if not isinstance(arch, str) or not re.fullmatch(r"sm_[1-9]\d{1,2}[af]?", arch):
        raise InputError(f"target: arch {arch!r}: expected 'sm_' and a number, such as 'sm_90'")


def _check_processor(config: Mapping[str, Any]) -> None:
    """Refuse a triple that ends the process in LLVM, and processors that it replaces by another."""
    triple, mcpu = config.get("mtriple", ""), config.get("mcpu")
    known = sorted(str(t) for t in llvm.llvm_get_targets())
    machine = str(triple).partition("-")[0]
    aliases = ("amd64", "arm64", "i486", "i586", "i686")
    if machine and machine not in aliases and not machine.startswith(tuple(known)):
        raise InputError(
            f"target: mtriple {triple!r}: LLVM knows no {machine!r}; expected for example "
            "'x86_64-linux-gnu' or 'aarch64-linux-gnu'"
        )
    cores = config.get("num-cores")
    if isinstance(cores, int) and cores < 1:
        raise InputError(f"target: num-cores {cores}: expected at least 1")
    if isinstance(mcpu, str):
        basis = {"kind": "llvm", **({"mtriple": triple} if triple else {})}
        processors = {str(p) for p in llvm.llvm_get_cpu_archlist(Target(basis))} | {"generic"}
        if mcpu not in processors:
            close = difflib.get_close_matches(mcpu, processors, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
            raise InputError(f"target: LLVM knows no mcpu {mcpu!r}{hint}")


def _finish(config: dict[str, Any]) -> Target:
    kind = config.get("kind")
    if kind == "native":
        config = {**_host_llvm(), **{k: v for k, v in config.items() if k != "kind"}}
    elif kind == "llvm" and config.get("mcpu") == "native":
        config = {**_host_llvm(), **{k: v for k, v in config.items() if k != "mcpu"}}
    elif kind == "cuda":
        config = {**_CUDA_DEFAULTS, **config}
        config.setdefault("host", {"kind": "llvm"})
        config.setdefault("arch", _present_arch())
        _check_arch(config)
    elif kind not in SUPPORTED_KINDS:
        raise UnknownNameError("target", str(kind), (*SUPPORTED_KINDS, "native"))
    if kind != "cuda":
        _check_processor(config)
    try:
        return Target(config)
    except Exception as error:
        raise InputError(f"target {config}: TVM refuses it: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def split_libraries(spec: str) -> tuple[list[str], str]:
    """Split tvmc's composite target text into library names and the target's own text.

    >>> split_libraries("cublas, cuda -arch=sm_90")
    (['cublas'], 'cuda -arch=sm_90')
    """
    if spec.lstrip().startswith("{"):
        return [], spec
    parts = [p.strip() for p in spec.split(",") if p.strip()]
    if not parts:
        raise InputError("the target is empty; expected for example 'native', 'llvm' or 'cuda'")
    # A flag's own commas (-mattr=+a,+b) continue the part before them.
    merged: list[str] = []
    for part in parts:
        if merged and "-mattr=" in merged[-1] and part[0] in "+-" and " " not in part:
            merged[-1] += "," + part
        else:
            merged.append(part)
    return merged[:-1], merged[-1]


def parse_target(spec: TargetLike | None = None) -> Target:
    """Return the Target that `spec` names.

    Parameters
    ----------
    spec : str, mapping or Target, optional
        None takes `Target.current()`. Text may be a kind ("llvm"), "native" (llvm for this
        machine's processor), a kind with flags ("cuda -arch=sm_90"), JSON, or a tag. A cuda
        target without limits gets those of every card since sm_70 (1024 threads, 48 KiB shared
        memory a block, warps of 32), the arch of the card in this machine or else sm_80, and an
        llvm host.

    Raises
    ------
    UnknownNameError
        For a kind other than llvm and cuda.
    InputError
        For text that cannot be read, or no target at all.
    """
    if spec is None:
        current = Target.current(allow_none=True)
        if current is None:
            raise InputError(
                "no target: pass one (default_pipeline('cuda')), or call inside `with target:`"
            )
        return parse_target(current)
    if isinstance(spec, Target):
        kind = spec.kind.name
        if kind not in SUPPORTED_KINDS:
            raise UnknownNameError("target", kind, SUPPORTED_KINDS)
        if kind == "cuda" and attribute(spec, "arch") is not None:
            _check_arch({"arch": attribute(spec, "arch")})
        if kind == "cuda" and any(attribute(spec, k) is None for k in _CUDA_DEFAULTS):
            config = json.loads(str(spec))
            if spec.host is not None:
                config["host"] = json.loads(str(spec.host))
            config.pop("tag", None)
            return _finish(config)
        return spec
    if isinstance(spec, Mapping):
        return _finish(dict(spec))
    if not isinstance(spec, str):
        raise InputError(f"target {spec!r}: expected text, a dict or a tvm.target.Target")
    libraries, text = split_libraries(spec)
    if libraries:
        raise InputError(
            f"target {spec!r} names libraries ({', '.join(libraries)}); "
            "only default_pipeline and the command line take those"
        )
    if text.startswith("{"):
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"target {text!r} is no JSON: {error}") from None
        return _finish(config)
    if "/" in text.split()[0]:
        try:
            return parse_target(Target(text))
        except UnknownNameError:
            raise
        except Exception as error:
            raise InputError(f"target tag {text!r}: {_first_line(error)}") from error
    return _finish(_from_flags(text))


def attribute(target: Target, name: str, default: Any = None) -> Any:
    """Return an attribute of the target as plain Python, or `default`."""
    value = target.attrs.get(name, None) if target.attrs else None
    return default if value is None else value


@functools.lru_cache(maxsize=64)
def _vector_bits(config: str) -> int:
    target = Target(json.loads(config))
    has = tvm.get_global_func("target.target_has_feature", allow_missing=True)
    features = {
        "x86": (("avx512f", 512), ("avx2", 256), ("avx", 256)),
    }
    triple = str(attribute(target, "mtriple", "") or "")
    mattr = " ".join(attribute(target, "mattr", []) or [])
    if "aarch64" in triple or "arm" in triple or "neon" in mattr:
        return 128
    if has is not None:
        for feature, bits in features["x86"]:
            with target:
                try:
                    if has(feature, target):
                        return bits
                except Exception:
                    break
    return 128


def vector_bits(target: Target) -> int:
    """Return the width of the target's vector registers in bits (llvm: 128, 256 or 512)."""
    if target.kind.name != "llvm":
        return 128
    return _vector_bits(str(target))


def vector_lanes(target: Target, dtype: str = "float32") -> int:
    """Return how many values of `dtype` fill one vector register."""
    return max(1, vector_bits(target) // tvm.DataType(dtype).bits)


def vector_registers(target: Target) -> int:
    """Return how many vector registers an inner loop may use."""
    if target.kind.name != "llvm":
        return 32
    triple = str(attribute(target, "mtriple", "") or "")
    return 32 if vector_bits(target) == 512 or "aarch64" in triple else 16


def num_threads(target: Target) -> int:
    """Return how many parallel chunks an llvm kernel should offer.

    Taken from the target's `num-cores`, else from this machine's processor count. At run time
    TVM_NUM_THREADS decides how many of them run at once.
    """
    cores = attribute(target, "num-cores")
    return int(cores) if cores else (os.cpu_count() or 1)
