"""Several modules as one: the functions of a model that were extracted one by one."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GlobalVar

from .cloning import Clone, free_name
from .errors import InputError
from .module_io import public_functions

__all__ = ["merge_modules"]


def merge_modules(parts: Mapping[str, tvm.IRModule]) -> tvm.IRModule:
    """Return one module with the only public function of each part, under the part's name.

    Functions that a part's function calls come along; those whose names are taken get new ones.

    Parameters
    ----------
    parts : mapping
        From the name that the function shall have ("decode") to a module.

    Raises
    ------
    InputError
        When a part has no public function, or several.
    """
    taken = set(parts)
    functions: dict[GlobalVar, tvm.ir.BaseFunc] = {}
    attrs: dict[str, object] = {}
    for name, mod in parts.items():
        public = list(public_functions(mod))
        if len(public) != 1:
            found = ", ".join(public) or "none"
            raise InputError(
                f"the module for {name!r} has {len(public)} public functions ({found}), expected "
                "one: choose it with --function"
            )
        renamed: dict[GlobalVar, GlobalVar] = {}
        for gvar in mod.functions:
            wanted = name if gvar.name_hint == public[0] else free_name(gvar.name_hint, taken)
            fresh = GlobalVar(wanted)
            if not gvar.ty.is_missing():
                relax.expr._update_type(fresh, gvar.ty)
            renamed[gvar] = fresh

        def new(gvar: GlobalVar, renamed: dict[GlobalVar, GlobalVar] = renamed) -> GlobalVar:
            return renamed.get(gvar, gvar)

        for gvar, func in mod.functions.items():
            made = tvm_ffi.structural_map(func, (GlobalVar, new), order="post")
            if isinstance(made, relax.Function):  # two parts may be made of the same variables
                made = Clone({}, {}).function(made)
            if made.attrs and "global_symbol" in made.attrs:
                made = made.with_attr("global_symbol", renamed[gvar].name_hint)
            functions[renamed[gvar]] = made
        attrs.update(dict(mod.attrs) if mod.attrs else {})
    merged = tvm.IRModule(functions)
    return merged.with_attrs(attrs) if attrs else merged
