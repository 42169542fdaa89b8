"""Skips this directory, with the reason, where CUDA code cannot be executed on the CPU."""

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
    """What dlight's tensor-core rule would import on first use, in seconds."""
    from relax_llm_passes.tensor_intrinsics import import_tensor_intrinsics

    import_tensor_intrinsics()
