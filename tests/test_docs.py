"""Generated documentation is what the registry says now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_passes_page_is_current():
    """Regenerate with: relax-llm-passes list --markdown > docs/passes.md."""
    # In a process of its own: other tests register passes in this one.
    printed = subprocess.run(
        [sys.executable, "-m", "relax_llm_passes", "list", "--markdown"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert (ROOT / "docs" / "passes.md").read_text() == printed
