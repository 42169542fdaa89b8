"""Models to Relax modules: the importer with its known faults worked around, and a detector for
them.

``find_importer_faults`` needs TVM only. Everything else needs the ``extract`` extra (torch,
transformers).
"""

from .faults import find_importer_faults
from .hf import extract_hf
from .torch_import import export_module, import_exported, load_pt2

__all__ = [
    "export_module",
    "extract_hf",
    "find_importer_faults",
    "import_exported",
    "load_pt2",
]
