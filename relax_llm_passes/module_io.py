"""Relax modules from files and back: TVMScript, TVM JSON, and torch.export's `.pt2`.

The kind of a file is read from its content, not from its name. TVMScript is parsed, never
executed: only the module itself, imports of TVM's script dialects and literal constants of a
Python file are looked at.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tvm
from tvm import relax

from .environment import ffi_problem
from .errors import InputError, UnsupportedError

__all__ = ["ModuleFile", "parse_script", "public_functions", "read_module", "write_module"]


@dataclass
class ModuleFile:
    """A module that was read, and what its reader should know.

    Attributes
    ----------
    mod : tvm.IRModule
        The module.
    kind : str
        "script", "json" or "pt2".
    warnings : list[str]
        Known faults of the importer found in the module, one line each.
    """

    mod: tvm.IRModule
    kind: str
    warnings: list[str] = field(default_factory=list)


def _one_line(error: BaseException) -> str:
    """Return the line of an error that says what is wrong, without decoration."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first = lines[0].removeprefix("error: ")
    place = next((line for line in lines if line.startswith("-->")), "")
    if place:
        number = place.rsplit(":", 2)[-2:]
        return f"line {number[0]}: {first}"
    # TVM's own errors end with what failed; Python's are one line.
    return first if len(lines) == 1 else lines[-1]


def public_functions(mod: tvm.IRModule) -> dict[str, relax.Function]:
    """Return the Relax functions that a caller of the compiled module can call, by name."""
    return {
        gvar.name_hint: func
        for gvar, func in mod.functions.items()
        if isinstance(func, relax.Function)
        and (not func.attrs or "Primitive" not in func.attrs)
        and func.attrs
        and "global_symbol" in func.attrs
    }


def read_module(path: str | Path) -> ModuleFile:
    """Read a Relax module.

    Parameters
    ----------
    path : str or Path
        TVMScript (a `.py` file or what `mod.script()` printed), TVM JSON (`tvm.ir.save_json`), or
        a program saved by `torch.export.save` (needs the extra "extract").

    Raises
    ------
    InputError
        When there is no such file or it holds no valid module: one line that says where and why.
    UnsupportedError
        For a `.pt2` file without PyTorch.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; expected a file with a Relax module") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if data[:4] == b"PK\x03\x04":
        file = ModuleFile(_read_exported(path), "pt2")
    else:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise InputError(
                f"{path} is neither TVMScript, TVM JSON nor a torch.export program"
            ) from None
        if not text.strip():
            raise InputError(f"{path} is empty; expected a Relax module")
        if text.lstrip()[0] == "{":
            file = ModuleFile(_read_json(path, text), "json")
        else:
            file = ModuleFile(_read_script(path, text), "script")
    if not public_functions(file.mod):
        raise InputError(f"{path}: the module has no public Relax function to compile")
    try:
        relax.analysis.well_formed(file.mod)
    except Exception as error:
        raise InputError(f"{path}: the module is not well-formed: {_one_line(error)}") from None
    file.warnings = _faults(file.mod)
    return file


def _faults(mod: tvm.IRModule) -> list[str]:
    from .extract.faults import find_importer_faults

    return [str(fault) for fault in find_importer_faults(mod)]


def _read_json(path: Path, text: str) -> tvm.IRModule:
    try:
        mod = tvm.ir.load_json(text)
    except Exception as error:
        raise InputError(f"{path} is no valid TVM JSON: {_one_line(error)}") from None
    if isinstance(mod, relax.Function):
        mod = tvm.IRModule.from_expr(mod)
    if not isinstance(mod, tvm.IRModule):
        raise InputError(f"{path} holds a {type(mod).__name__}, expected an IRModule")
    return mod


def _read_script(path: Path, text: str) -> tvm.IRModule:
    """Parse TVMScript; the constants of a graph of the corpus are in the JSON file beside it."""
    if not re.search(r"\bmetadata\[", text) or re.search(r"^\s*metadata\s*=", text, re.M):
        return parse_script(text, str(path))
    beside = path.with_suffix(".json")
    try:
        constants = json.loads(beside.read_text(encoding="utf-8"))["constants"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{path} uses constants that it does not hold (metadata[...]): print the module with "
            "mod.script(show_meta=True), or save it as JSON"
        ) from None
    from .corpus import decode_array, parse_module

    return parse_module(text, [decode_array(c) for c in constants], str(path))


def _read_exported(path: Path) -> tvm.IRModule:
    try:
        importlib.import_module("torch")
    except ImportError:
        raise UnsupportedError(
            f"{path} is a torch.export program; reading it needs PyTorch: "
            "pip install 'relax_llm_passes[extract]'"
        ) from None
    from .extract import load_pt2

    try:
        return load_pt2(path)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path} cannot be imported: {_one_line(error)}") from error


_NOT_FINITE = re.compile(r'R\.const\("(-?inf|nan)"')

# Decorators that begin a module or a function in TVMScript, by their last name.
_DECORATORS = ("ir_module", "function", "prim_func")


def _decorated(node: ast.stmt) -> bool:
    for decorator in getattr(node, "decorator_list", []):
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name in _DECORATORS:
            return True
    return False


def _relax_function(node: ast.FunctionDef) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(isinstance(d, ast.Attribute) and d.attr == "function" for d in decorators)


def _imports(node: ast.Import | ast.ImportFrom) -> dict[str, Any]:
    """Return what an import of TVM's own modules binds; other packages' code is not run."""
    names: dict[str, Any] = {}
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "tvm":
                module = importlib.import_module(alias.name)
                names[alias.asname or "tvm"] = module if alias.asname else tvm
    elif node.module and node.module.split(".")[0] == "tvm" and not node.level:
        module = importlib.import_module(node.module)
        for alias in node.names:
            value = getattr(module, alias.name, None)
            if value is None:
                value = importlib.import_module(f"{node.module}.{alias.name}")
            names[alias.asname or alias.name] = value
    return names


def _constant(value: ast.expr) -> Any:
    """Return the value of a literal, or of what `script()` prints before the module."""
    if isinstance(value, ast.Call) and len(value.args) == 1:
        argument, called = value.args[0], ast.unparse(value.func)
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            if called == "tvm.ir.load_json":  # constants
                return tvm.ir.load_json(argument.value)
            if called in ("TypeVar", "typing.TypeVar"):  # symbolic sizes
                return TypeVar(argument.value)
    return ast.literal_eval(value)


def parse_script(text: str, name: str = "<text>") -> tvm.IRModule:
    """Parse TVMScript text into a module.

    Parameters
    ----------
    text : str
        What `mod.script()` prints, or a Python file with one `@I.ir_module` class. Imports of
        TVM's modules and assignments of literals before it are honoured; nothing is executed.
    name : str
        Used in error messages.

    Raises
    ------
    InputError
        With the line that is wrong.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        reason = getattr(error, "msg", str(error))
        raise InputError(f"{name} is no TVMScript: {where}{reason}") from None
    from tvm.script.parser.core.entry import _default_globals

    variables: dict[str, Any] = dict(_default_globals())
    found: list[ast.stmt] = []
    for node in tree.body:
        if _decorated(node):
            found.append(node)
            continue
        try:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                variables.update(_imports(node))
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    variables[target.id] = _constant(node.value)
        except Exception:  # Not a literal; the parser says so if the module uses it.
            continue
    if not found:
        raise InputError(f"{name} is no TVMScript: expected a class with @I.ir_module")
    classes = [n for n in found if isinstance(n, ast.ClassDef)]
    if len(classes) > 1:
        names = ", ".join(n.name for n in classes)
        raise InputError(f"{name} has {len(classes)} modules ({names}); expected one")
    node = (classes or found)[0]
    for function in (n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)):
        # A truncated file can still parse; TVM takes such a function to return an empty tuple.
        if _relax_function(function) and not isinstance(function.body[-1], ast.Return):
            raise InputError(f"{name}: function {function.name!r} ends without a return")
    first = min(d.lineno for d in node.decorator_list)  # type: ignore[attr-defined]
    lines = text.splitlines()[first - 1 : node.end_lineno]
    # TVM prints infinities in a way that its parser does not take.
    lines = [_NOT_FINITE.sub(r'R.const(float("\1")', line) for line in lines]
    variables.setdefault("float", float)
    source = "\n" * (first - 1) + "\n".join(lines) + "\n"
    problem = ""
    mod: Any = None
    try:
        mod = tvm.script.from_source(source, extra_vars=dict(variables))
    except Exception as error:
        problem = _one_line(error)
    if problem:  # Raised out here so that the parser's half-built state is freed first.
        raise InputError(f"{name}: {problem}")
    if isinstance(mod, relax.Function):
        func = mod
        symbol = node.name  # type: ignore[attr-defined]
        if not func.attrs or "global_symbol" not in func.attrs:
            func = func.with_attr("global_symbol", symbol)
        mod = tvm.IRModule({symbol: func})
    if not isinstance(mod, tvm.IRModule):
        raise InputError(f"{name} holds a {type(mod).__name__}, expected a module")
    return mod


def write_module(mod: tvm.IRModule, path: str | Path) -> None:
    """Write a module: as JSON for a path that ends in `.json`, else as TVMScript.

    TVMScript with constants carries them as metadata, so that it can be read back.
    """
    path = Path(path)
    problem = ffi_problem()
    if path.suffix == ".json":
        if problem:
            raise UnsupportedError(f"cannot write {path}: {problem}")
        text = tvm.ir.save_json(mod)
    else:
        text = mod.script(show_meta=not problem)
        if not text.endswith("\n"):
            text += "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
