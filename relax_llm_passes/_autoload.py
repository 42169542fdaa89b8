"""Runs at `import tvm`: makes relax_pipeline="relax_llm" known. Imports the package on use only."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the pipeline's name with TVM; harmless when called again."""
    import tvm

    if getattr(tvm, "_RUNTIME_ONLY", False):
        return  # Only the runtime is there: nothing can be compiled.
    from tvm.relax.pipeline import PIPELINE_MAP, register_pipeline

    if "relax_llm" in PIPELINE_MAP:
        return

    @register_pipeline("relax_llm")
    def _pipeline(**options):  # type: ignore[no-untyped-def]
        from .pipeline import deferred_pipeline

        return deferred_pipeline(**options)
