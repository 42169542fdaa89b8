"""Rotary by complex numbers, as Meta's Llama code writes it, imported and recognised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.extract import export_module, import_exported
from relax_llm_passes.patterns.rotary import Rotary, RotaryMatch, find_rotary

torch: Any = pytest.importorskip("torch")


class Complex(torch.nn.Module):
    """q (B, S, H, D) turned by `polar(1, angles)`, positions from 3 on."""

    def __init__(self) -> None:
        super().__init__()
        steps = 10000.0 ** (-torch.arange(0, 8, 2).float() / 8)
        self.register_buffer("angles", torch.outer(torch.arange(32).float(), steps))

    def forward(self, q: Any) -> Any:
        turns = torch.polar(torch.ones_like(self.angles), self.angles)[3 : 3 + q.shape[1]]
        turns = turns.view(1, q.shape[1], 1, 4) * 0.5
        pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(q)


def test_rotary_by_complex_numbers() -> None:
    model, q = Complex(), torch.randn(2, 5, 3, 8)
    mod = import_exported(export_module(model, (q,)))
    relax.analysis.well_formed(mod)
    found = find_rotary(FunctionView(mod, "main"))
    assert [m.rotary for m in found if isinstance(m, RotaryMatch)] == [Rotary("interleaved", 8, 8)]
    vm = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(q.numpy())).numpy()
    np.testing.assert_allclose(got, model(q).numpy(), rtol=2e-6, atol=2e-6)
