"""Model code that is no installable dependency: where it lies, and how it is imported without its
package's start-up.

The folder is named by ``RELAX_LLM_SOURCES``; README.md says which commands fill it.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any


def folder(*parts: str) -> Path:
    """A path below ``$RELAX_LLM_SOURCES``.

    Raises
    ------
    FileNotFoundError
        When the variable is unset or the path is missing; the text says what to do.
    """
    root = os.environ.get("RELAX_LLM_SOURCES")
    path = Path(root, *parts) if root else None
    if path is None or not path.exists():
        raise FileNotFoundError(
            f"model sources {'/'.join(parts)} not found below RELAX_LLM_SOURCES={root!r}; "
            "tests/graphs/README.md lists the commands that fetch them"
        )
    return path


def package(name: str, path: Path | None = None, **members: Any) -> types.ModuleType:
    """Put an empty package into ``sys.modules``; its submodules are then found in `path`."""
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = [str(path)] if path else []
    for key, value in members.items():
        setattr(module, key, value)
    sys.modules[name] = module
    return module
