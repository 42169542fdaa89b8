"""Rows written at positions from memory: `index_put` and `index_copy` of one axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.extract import export_module, import_exported

torch: Any = pytest.importorskip("torch")


class Write(torch.nn.Module):
    def __init__(self, axis: int, copy: bool) -> None:
        super().__init__()
        self.axis, self.copy = axis, copy

    def forward(self, cache: Any, rows: Any, places: Any) -> Any:
        if self.copy:
            return cache.index_copy(self.axis, places, rows)
        changed = cache.clone()
        changed[(slice(None),) * self.axis + (places,)] = rows
        return changed


@pytest.mark.parametrize(("axis", "copy"), [(2, True), (2, False), (1, False), (0, False)])
def test_one_axis_by_a_list_of_positions(axis: int, copy: bool) -> None:
    shape = (3, 4, 5, 2)
    rows_shape = tuple(2 if i == axis else n for i, n in enumerate(shape))
    cache, rows = torch.randn(shape), torch.randn(rows_shape)
    places = torch.tensor([2, 0])
    model = Write(axis, copy)
    mod = import_exported(export_module(model, (cache, rows, places)))
    relax.analysis.well_formed(mod)
    vm = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    got = vm["main"](*[tvm.runtime.tensor(a.numpy()) for a in (cache, rows, places)]).numpy()
    np.testing.assert_array_equal(got, model(cache, rows, places).numpy())
