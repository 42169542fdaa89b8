"""Model families that the corpus is extracted from, one file each."""

from __future__ import annotations

import importlib
import pkgutil

from .recipe import RECIPES, Recipe, Source

__all__ = ["RECIPES", "Recipe", "Source", "load_families"]


def load_families() -> dict[str, Recipe]:
    """Import every family file, and return the recipes by graph name.

    A family whose own packages are missing still lists its recipes; it fails, with the reason, when
    built.
    """
    for entry in pkgutil.iter_modules(__path__):
        if entry.name in ("external", "hf_common", "mlc", "recipe"):
            continue  # shared by families, imported when one is built
        importlib.import_module(f"{__name__}.{entry.name}")
    return RECIPES
