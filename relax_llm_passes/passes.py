"""Imports every module that registers a pass, a library or an implementation."""

from __future__ import annotations

import importlib

# In the order of the default pipeline.
MODULES = (
    "relax_llm_passes.fusion.canonicalize_bindings",
    "relax_llm_passes.fusion.partition_gemm",
    "relax_llm_passes.lower",
    "relax_llm_passes.fusion.legalize_norms",
    "relax_llm_passes.keep_effects",
    "relax_llm_passes.finish",
    "relax_llm_passes.schedule",
    "relax_llm_passes.kernels.cpu_implementation",
)

for _name in MODULES:
    importlib.import_module(_name)
