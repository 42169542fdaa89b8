"""Skips this directory, with the reason, where CUDA code cannot be executed on the CPU."""

import inspect
from pathlib import Path

import pytest

from relax_llm_passes.cuda_on_cpu import why_not

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    reason = why_not()
    for item in items:
        if _HERE not in Path(item.fspath).parents or item.get_closest_marker("gpu"):
            continue
        item.add_marker(pytest.mark.cuda)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"CUDA on the CPU: {reason}"))


@pytest.fixture(scope="session")
def tensor_intrinsics():
    """dlight's tensor-core rule imports TVM's intrinsics on first use, which takes two minutes as
    TVM asks for the module of every frame of the import; answered with None it takes seconds.
    """
    original = inspect.getmodule
    inspect.getmodule = lambda *args, **kwargs: None
    try:
        import tvm.s_tir.tensor_intrin.cuda  # noqa: F401
    finally:
        inspect.getmodule = original
