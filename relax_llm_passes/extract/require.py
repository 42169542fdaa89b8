"""Imports of optional packages, with an error that says which extra brings them."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import InputError

__all__ = ["require"]


def require(module: str, purpose: str) -> ModuleType:
    """Import `module` or say how to get it.

    Raises
    ------
    InputError
        When it is not installed; the text names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise InputError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported "
            f"({err}): install "
            "the extra, pip install 'relax_llm_passes[extract]'"
        ) from err
