"""Imports every module that registers a pass, in the order of the default pipeline."""

from __future__ import annotations

import importlib

MODULES = (
    "relax_llm_passes.fusion.canonicalize_bindings",
)

for _name in MODULES:
    importlib.import_module(_name)
