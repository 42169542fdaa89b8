"""Turn a Hugging Face configuration folder into a Relax module (needs the extra "extract")."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import InputError
from .common import Progress, quiet_on_error, warn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("folder", help="holds config.json; weights become inputs of the function")
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="TVMScript (.py) or TVM JSON (.json); default: the folder's name with the mode",
    )
    parser.add_argument(
        "--mode",
        default="decode",
        metavar="MODE",
        help="prefill, prefill_cache or decode (default), with a symbolic length; generate: the "
        "last two in one module",
    )
    parser.add_argument(
        "--dtype", default="float32", metavar="TYPE", help="float32 (default), float16 or bfloat16"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    parser.add_argument(
        "--longest", type=int, default=0, metavar="N", help="bound of the symbolic length"
    )
    parser.add_argument(
        "--keep-attention", action="store_true", help="keep attention as one operator"
    )


def run(args: argparse.Namespace) -> int:
    """Extract and write the module."""
    folder = Path(args.folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no config.json: expected a Hugging Face model's folder")
    output = Path(args.output or f"{folder.resolve().name}_{args.mode}.py")
    if output.suffix not in (".py", ".json"):
        raise InputError(f"--output {output}: expected a name that ends in .py or .json")
    from ..extract import extract_hf, find_importer_faults
    from ..module_io import public_functions, write_module

    with Progress() as progress:
        progress(f"extracting {folder}")
        with quiet_on_error():
            mod = extract_hf(
                folder,
                mode=args.mode,
                dtype=args.dtype,
                batch=args.batch,
                keep_attention=args.keep_attention,
                longest=args.longest,
            )
        progress(f"writing {output}")
        write_module(mod, output)
    for fault in find_importer_faults(mod):
        warn(f"{output}: {fault}")
    for name, func in public_functions(mod).items():
        print(f"{output}: {name} with {len(func.params)} inputs")
    return 0
