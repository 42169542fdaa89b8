"""Turn a Hugging Face configuration folder into a Relax module (needs the extra "extract")."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("folder")


def run(args: argparse.Namespace) -> int:
    """Extract and write the module."""
    return 0
