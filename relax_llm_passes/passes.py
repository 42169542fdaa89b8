"""Imports every module that registers a pass, a library or an implementation."""

from __future__ import annotations

import importlib

# In the order of the default pipeline.
MODULES = (
    "relax_llm_passes.fusion.expand_attention",
    "relax_llm_passes.fusion.expand_rotary",
    "relax_llm_passes.fusion.canonicalize_bindings",
    "relax_llm_passes.fusion.inplace_kv_cache",
    "relax_llm_passes.fusion.raise_softmax",
    "relax_llm_passes.fusion.wkv",
    "relax_llm_passes.fusion.group_norm_gate",
    "relax_llm_passes.fusion.token_mix",
    "relax_llm_passes.fusion.rotary_attention",
    "relax_llm_passes.fusion.split_rotary",
    "relax_llm_passes.fusion.dequantize_take",
    "relax_llm_passes.fusion.combine_parallel_matmul",
    "relax_llm_passes.fusion.partition_gemm",
    "relax_llm_passes.fusion.row_reduction",
    "relax_llm_passes.fusion.offload_cublas",
    "relax_llm_passes.fusion.offload_cutlass",
    "relax_llm_passes.fusion.pack_weights",
    "relax_llm_passes.lower",
    "relax_llm_passes.fusion.join_row_products",
    "relax_llm_passes.fusion.legalize_norms",
    "relax_llm_passes.fusion.wkv_primfunc",
    "relax_llm_passes.keep_effects",
    "relax_llm_passes.finish",
    "relax_llm_passes.schedule",
    "relax_llm_passes.kernels.attention",
    "relax_llm_passes.kernels.cpu_batched_implementation",
    "relax_llm_passes.kernels.cpu_implementation",
    "relax_llm_passes.kernels.cuda_gemm",
    "relax_llm_passes.kernels.cuda_quantized",
    "relax_llm_passes.kernels.dequantize_take",
    "relax_llm_passes.kernels.group_norm",
    "relax_llm_passes.kernels.rotary",
    "relax_llm_passes.kernels.row_reduction",
    "relax_llm_passes.kernels.token_mix",
    "relax_llm_passes.kernels.wkv",
)

for _name in MODULES:
    importlib.import_module(_name)
