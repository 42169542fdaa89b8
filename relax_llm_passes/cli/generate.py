"""`run --generate`: greedy generation with a compiled library, its ids and its speed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .common import Progress, parse_sizes, write_text

__all__ = ["add_arguments", "read_prompt", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of generation."""
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--generate",
        type=int,
        metavar="N",
        help="generate N tokens greedily with a library of `compile --kv-cache`, or of an RWKV "
        "model; prints their ids and tokens per second",
    )
    group.add_argument(
        "--prompt-ids",
        metavar="IDS",
        help="token ids: 1,2,3, or an .npz file with one array (its name does not matter)",
    )


def read_prompt(text: str) -> np.ndarray:
    """Return token ids as (B, S) from "1,2,3", or from the only array of an .npz file."""
    if text.endswith((".npz", ".npy")) or Path(text).is_file():
        from .run_command import read_npz

        arrays = read_npz(text)
        if len(arrays) != 1:
            raise InputError(f"{text} holds {', '.join(arrays) or 'nothing'}; expected one array")
        (ids,) = arrays.values()
        if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or not ids.size:
            raise InputError(
                f"{text} holds {ids.dtype} {ids.shape}; expected token ids: integers, (S,) or (B,S)"
            )
        return np.atleast_2d(ids)
    words = text.replace(",", " ").split()
    if not words or not all(w.isascii() and w.isdigit() for w in words):
        raise InputError(
            f"--prompt-ids {text!r}: expected numbers such as 1,2,3, or an .npz file that exists"
        )
    return np.array([[int(w) for w in words]], dtype="int64")


def run(
    args: argparse.Namespace, record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> int:
    """Load, generate, print."""
    from ..environment import thread_count
    from ..generation import Generator
    from ..weights import read_weights
    from .run_command import load_machine, write_npz

    if args.generate < 1:
        raise InputError(f"--generate {args.generate}: expected at least 1")
    if args.repeat != 1 or args.function:
        option = "--function" if args.function else "--repeat"
        raise InputError(f"{option} is not taken with --generate")
    if args.prompt_ids is None:
        raise InputError("--generate needs a prompt: --prompt-ids 1,2,3")
    prompt = read_prompt(args.prompt_ids)
    weights = read_weights(args.params) if args.params else None
    with Progress() as progress:
        progress(f"loading {args.library}")
        machine, device = load_machine(args.library, record)
        progress("placing weights")
        generator = Generator(
            machine,
            device,
            record,
            weights,
            seed=args.seed,
            states=arrays,
            sizes=parse_sizes(args.shape),
        )
        chosen, moments = [], [time.perf_counter()]
        for token in generator.tokens(prompt, args.generate):
            moments.append(time.perf_counter())
            chosen.append(token)
            progress(f"token {len(chosen)} of {args.generate}")
    ids = np.stack(chosen, axis=1)
    for row, answer in zip(prompt, ids, strict=True):
        print("prompt:   ", " ".join(map(str, row)))
        print("generated:", " ".join(map(str, answer)))
    if not args.params:
        print(f"weights drawn with seed {args.seed}: --params FILE gives real ones")
    first = moments[1] - moments[0]
    rest = moments[-1] - moments[1]
    rate = len(prompt) * (args.generate - 1) / rest if args.generate > 1 else None
    threads = thread_count()
    print(
        f"prompt of {prompt.shape[1]} and first token: {first * 1e3:.3f} ms"
        + (f"; then {rate:.1f} tokens/s" if rate else "")
        + f" ({threads} thread{'s' if threads != 1 else ''})"
    )
    if args.output:
        write_npz(args.output, [ids], ["ids"])
    if args.json:
        result = {
            "library": args.library,
            "prompt": prompt.tolist(),
            "generated": ids.tolist(),
            "first_token_seconds": first,
            "tokens_per_second": rate,
        }
        write_text(args.json, json.dumps(result, indent=2))
    return 0
