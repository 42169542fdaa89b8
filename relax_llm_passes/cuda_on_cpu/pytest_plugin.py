"""pytest: ``--cuda-checks`` and the marker ``cuda_checks`` choose what is checked of CUDA code.

    pytest -p relax_llm_passes.cuda_on_cpu.pytest_plugin --cuda-checks=races,bounds

The marker of a test counts before the option, the option before the environment variable, and what
a call names itself before all of them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from ..errors import InputError
from .checks import CHECKS, VARIABLE, choose_checks, use_checks

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.getgroup("CUDA on the CPU").addoption(
        "--cuda-checks",
        metavar="NAMES",
        help="checks of CUDA code executed on the CPU: all, none, or of "
        f"{', '.join(CHECKS)} with commas; -NAME leaves one out (default: ${VARIABLE}, else all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and refuse an option that names no check."""
    config.addinivalue_line(
        "markers", "cuda_checks(NAMES, ...): checks of CUDA code in this test, as --cuda-checks"
    )
    try:
        choose_checks(config.getoption("--cuda-checks"))
    except InputError as e:
        raise pytest.UsageError(f"--cuda-checks: {e}") from e


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the test with its checks."""
    marker = item.get_closest_marker("cuda_checks")
    with use_checks(marker.args if marker else item.config.getoption("--cuda-checks")):
        return (yield)
