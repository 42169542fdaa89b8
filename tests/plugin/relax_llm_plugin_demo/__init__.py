"""A pass, a library that switches it on, and an implementation of a composite of its own kind."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax, te

import relax_llm_passes as rlp


@dataclass(frozen=True)
class MarkReluOptions:
    """Options of MarkRelu.

    Attributes
    ----------
    limit : int
        How many relu are outlined in a function.
    """

    limit: int = 1000


class ReluKernel:
    """relu as a TE kernel of the plugin's own."""

    name = "demo.relu"
    kind = "demo_relu"
    targets = ("llvm", "cuda")

    def accepts(self, composite, target):
        """Take float32 only."""
        if str(composite.ty("data").dtype) != "float32":
            return rlp.Refusal(f"dtype {composite.ty('data').dtype}, expected float32")
        return rlp.Accept("te kernel")

    def emit(self, composite, args, bb, target):
        """Emit one kernel."""

        def relu(x):
            zero = tvm.tirx.const(0.0, "float32")
            return te.compute(x.shape, lambda *i: te.max(x[i], zero), name="demo_relu")

        return bb.call_te(relu, args[composite.roles["data"]], primfunc_name_hint="demo_relu")


def register() -> None:
    """Entry point."""
    from relax_llm_passes.dataflow import FunctionView
    from relax_llm_passes.outline import Region, outline

    @rlp.register_pass("MarkRelu", stage="optional", options=MarkReluOptions)
    def mark_relu(mod: tvm.IRModule, run: rlp.PassRun) -> tvm.IRModule:
        """Outline relu, so that the plugin's kernel computes it."""
        for gvar, func in list(mod.functions.items()):
            if not isinstance(func, relax.Function):
                continue
            view = FunctionView(mod, gvar)
            regions = []
            for binding in view.bindings:
                call = view.call(binding.var, "relax.nn.relu")
                if call is not None and len(regions) < run.options.limit:
                    regions.append(Region("demo_relu", [binding.var], {"data": call.args[0]}))
                    run.record.match("relu", 1, view.name, binding.var.name)
            if regions:
                mod, refusals = outline(mod, gvar, regions)
                for refusal in refusals:
                    run.record.refuse(refusal)
        return mod

    rlp.register_implementation("demo_relu")(ReluKernel)
    rlp.register_library(
        rlp.Library(
            "demolib",
            ("llvm", "cuda"),
            passes=("MarkRelu",),
            options={"MarkRelu": {"limit": 1}},
            summary="computes the first relu itself",
        )
    )
