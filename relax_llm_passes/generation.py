"""Greedy generation with a compiled library: the loop over prefill and decode, caches or states.

    from relax_llm_passes.generation import Generator

    generator = Generator.load("model.so", "model.safetensors")
    tokens = generator.generate([[1, 2, 3]], 64)          # (1, 64)

What it does with caches, written out:

    caches = list(vm["decode_create_cache"]())
    logits, *_ = vm["prefill_inplace"](prompt, *caches, ShapeTuple([0]), *weights)
    for length in range(prompt.shape[1], ...):
        token = logits.numpy()[:, -1].argmax(-1)[:, None]
        logits, *_ = vm["decode_inplace"](token, *caches, ShapeTuple([length]), *weights)

and with states (RWKV): `logits, *states = vm["main"](token, *states, *weights)`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError, UnsupportedError
from .signature import Signature, evaluate, read_sidecar
from .weights import match_weights, read_weights

__all__ = ["Generator", "random_weight"]


def random_weight(name: str, shape: Sequence[int], dtype: str, seed: int) -> np.ndarray:
    """Return weights that keep activations in range: matrices with variance 1 / columns, vectors
    near 1. One name and seed give one array, whatever function takes it."""
    from .sampling import numpy_dtype, random_array

    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    kind = numpy_dtype(dtype)
    if kind.kind in "biu":
        return random_array(tuple(shape), dtype, rng)
    values = rng.standard_normal(tuple(shape), dtype="float32")
    if len(shape) < 2:
        return (1 + 0.1 * values).astype(kind)
    return (values / np.float32(shape[-1]) ** 0.5).astype(kind)


class Generator:
    """Drives a compiled library that generates text.

    Parameters
    ----------
    machine : tvm.relax.VirtualMachine
        Of the library.
    device : tvm.runtime.Device
        That it runs on.
    record : mapping
        The library's sidecar (:func:`relax_llm_passes.signature.read_sidecar`).
    weights : Weights, optional
        From :func:`relax_llm_passes.weights.read_weights`; random ones by `seed` without.
    states : mapping, optional
        Of a recurrent model: arrays by parameter name that its states begin with; else zeros.
    sizes : mapping, optional
        Symbolic sizes of weights.

    Raises
    ------
    InputError
        When the library has no functions that generate, or the weights do not fit.
    """

    def __init__(
        self,
        machine: Any,
        device: Any,
        record: Mapping[str, Any],
        weights: Any = None,
        *,
        seed: int = 0,
        states: Mapping[str, np.ndarray] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        plan = record.get("generation")
        if not plan:
            raise InputError(
                "the library has no functions that generate: compile a decode function with "
                "`relax-llm-passes compile FILE --kv-cache ROWS` (or an RWKV step with its states)"
            )
        self.machine, self.device = machine, device
        self.step = plan["step"]
        self.prefill = plan["prefill"]
        self.capacity: int | None = plan["capacity"]
        self._create = plan["create"]
        self._signatures = {
            s["function"]: Signature(s["function"], record["functions"][s["function"]])
            for s in (self.step, self.prefill)
            if s is not None
        }
        self._initial = dict(states or {})
        self._sizes = dict(sizes or {})
        self._weights: dict[str, list[Any]] = {}
        self._place_weights(weights, seed)
        self._check_states()
        self._states: list[Any] = []
        self.length = 0

    @classmethod
    def load(cls, library: str | Path, weights: str | Path | None = None, **more: Any) -> Generator:
        """Load a library that `relax-llm-passes compile` wrote, and the weights for it."""
        import tvm
        from tvm import relax

        record = read_sidecar(library)
        kind = record.get("target", {}).get("kind", "llvm")
        device = tvm.cuda(0) if kind == "cuda" else tvm.cpu()
        if not device.exist:
            raise UnsupportedError(f"{library} is compiled for {kind}, and there is no such device")
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), device)
        opened = None if weights is None else read_weights(weights)
        return cls(machine, device, record, opened, **more)

    def _params(self, step: Mapping[str, Any]) -> list[dict[str, Any]]:
        return list(self._signatures[step["function"]].record["params"])

    def _place_weights(self, weights: Any, seed: int) -> None:
        """Put every function's weights on the device; those of one name only once."""
        import tvm

        placed: dict[str, Any] = {}
        for step in (self.prefill, self.step):
            if step is None:
                continue
            params = [self._params(step)[i] for i in step["weights"]]
            new = [p for p in params if p["name"] not in placed]
            if weights is not None:
                arrays = match_weights(new, weights, step.get("weight_names"))
            else:
                arrays = {}
                sizes = self._signatures[step["function"]].sizes({}, {}) | self._sizes
                for param in new:
                    ty = param["type"]
                    if ty["kind"] != "tensor" or ty["shape"] is None:
                        raise InputError(f"weight {param['name']} is no tensor of known shape")
                    shape = [evaluate(e, sizes) for e in ty["shape"]]
                    arrays[param["name"]] = random_weight(param["name"], shape, ty["dtype"], seed)
            for name, array in arrays.items():
                placed[name] = tvm.runtime.tensor(array, self.device)
            self._weights[step["function"]] = [placed[p["name"]] for p in params]

    def _check_states(self) -> None:
        params = self._params(self.step)
        names = {params[i]["name"]: params[i]["type"] for i in self.step["states"]}
        for name, array in self._initial.items():
            if name not in names or self._create is not None:
                raise InputError(f"{name} is no state of {self.step['function']}")
            shape = tuple(names[name]["shape"])
            if array.shape != shape or str(array.dtype) != names[name]["dtype"]:
                raise InputError(
                    f"state {name} is {array.dtype} {array.shape}, expected "
                    f"{names[name]['dtype']} {shape}"
                )

    def reset(self, batch: int = 1) -> None:
        """Begin a new text: empty caches, or states as they are at the beginning."""
        import tvm

        from .sampling import numpy_dtype

        self.length = 0
        params = self._params(self.step)
        ids = params[self.step["ids"]]["type"]["shape"]
        if len(ids) == 2 and isinstance(ids[0], int) and ids[0] != batch:
            raise InputError(f"a batch of {batch}, but the library is compiled for {ids[0]}")
        if len(ids) < 2 and batch != 1:
            raise InputError(f"a batch of {batch}, but the library takes one text")
        if self._create is not None:
            symbolic = len(ids) == 2 and isinstance(ids[0], str)
            sizes = [tvm.runtime.ShapeTuple([batch])] if symbolic else []
            self._states = list(self.machine[self._create](*sizes))
            return
        self._states = []
        for i in self.step["states"]:
            name, ty = params[i]["name"], params[i]["type"]
            array = self._initial.get(name)
            if array is None:
                array = np.zeros(ty["shape"], numpy_dtype(ty["dtype"]))
            self._states.append(tvm.runtime.tensor(array, self.device))

    def _chunk(self, remaining: int) -> tuple[Mapping[str, Any], int]:
        """Return the function that takes the next tokens, and how many of them."""
        steps = [self.step] if self.prefill is None else [self.prefill, self.step]
        for step in steps:
            # A prefill that reads no cache begins a text; one with states goes on anywhere.
            if step is self.prefill and self._create is not None and self.length:
                continue
            rows = step["rows"]
            if isinstance(rows["size"], int):
                if rows["size"] <= remaining:
                    return step, rows["size"]
                continue
            most = min(remaining, rows["most"] or remaining)
            if most >= rows["least"]:
                return step, most
        raise InputError(
            f"{remaining} more tokens, but {self.step['function']} takes "
            f"{self.step['rows']['size']} at once"
        )

    def feed(self, ids: np.ndarray) -> np.ndarray:
        """Take the next tokens of the text.

        Parameters
        ----------
        ids : ndarray
            (B, S) integers.

        Returns
        -------
        ndarray
            (B, V) logits behind the last of them, in float32.

        Raises
        ------
        InputError
            When the caches have no room for them.
        """
        if ids.shape[1] < 1:
            raise InputError("no tokens: expected at least one")
        if not self._states:
            self.reset(ids.shape[0])
        self._check_room(ids.shape[1])
        logits = None
        done = 0
        while done < ids.shape[1]:
            step, count = self._chunk(ids.shape[1] - done)
            logits = self._call(step, ids[:, done : done + count])
            done += count
        assert logits is not None
        return _last_row(logits, ids.shape[0])

    def _check_room(self, count: int) -> None:
        if self.capacity is not None and self.length + count > self.capacity:
            raise InputError(
                f"the caches hold {self.capacity} tokens: {self.length} are in use and {count} "
                "more do not fit; compile with a larger --kv-cache, or generate fewer"
            )

    def _call(self, step: Mapping[str, Any], ids: np.ndarray) -> Any:
        import tvm

        params = self._params(step)
        arguments: list[Any] = [None] * len(params)

        def put(place: int, values: np.ndarray) -> None:
            ty = params[place]["type"]
            shape = values.shape[values.ndim - len(ty["shape"]) :]
            array = np.array(values.reshape(shape), ty["dtype"], order="C")
            arguments[place] = tvm.runtime.tensor(array, self.device)

        put(step["ids"], ids)
        if step["positions"] is not None:
            row = np.arange(self.length, self.length + ids.shape[1])
            wide = len(params[step["positions"]]["type"]["shape"]) == 2
            put(step["positions"], np.broadcast_to(row, ids.shape) if wide else row)
        for place, state in zip(step["states"], self._states, strict=True):
            arguments[place] = state
        if step["length"] is not None:
            arguments[step["length"]] = tvm.runtime.ShapeTuple([self.length])
        for place, weight in zip(step["weights"], self._weights[step["function"]], strict=True):
            arguments[place] = weight
        results = _flat(self.machine[step["function"]](*arguments))
        if step["results"]:
            self._states = [results[i] for i in step["results"]]
        self.length += ids.shape[1]
        return results[step["logits"]]

    def tokens(self, prompt: Any, count: int) -> Iterator[np.ndarray]:
        """Yield `count` greedily chosen tokens, one (B,) array each.

        Parameters
        ----------
        prompt : array-like
            (B, S) or (S,) token ids.
        count : int
            Tokens to generate.

        Raises
        ------
        InputError
            For ids that the model does not have, or when prompt and result do not fit into the
            caches (before anything is computed).
        """
        ids = np.atleast_2d(np.asarray(prompt))
        if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
            raise InputError("the prompt: expected token ids, at least one, as whole numbers")
        self.reset(ids.shape[0])
        self._check_room(ids.shape[1] + count - 1)
        self._check_vocabulary(ids)
        for i in range(count):
            logits = self.feed(ids)
            choice = logits.argmax(-1)
            yield choice
            ids = choice[:, None]
            if i == 0:
                self._check_vocabulary(choice[None], logits.shape[-1])

    def _check_vocabulary(self, ids: np.ndarray, size: int | None = None) -> None:
        """A lookup outside of the embedding reads whatever lies there."""
        if size is None:
            leaves = _leaves(self._signatures[self.step["function"]].record["result"])
            last = (leaves[self.step["logits"]].get("shape") or [None])[-1]
            size = last if isinstance(last, int) else None
        bad = ids[(ids < 0) | (ids >= size)] if size is not None else ids[ids < 0]
        if bad.size:
            known = f"the model knows 0 to {size - 1}" if size is not None else "expected 0 or more"
            raise InputError(f"token id {int(bad.flat[0])}: {known}")

    def generate(self, prompt: Any, count: int) -> np.ndarray:
        """Return `count` greedily chosen tokens behind the prompt, (B, count)."""
        if count < 1:
            raise InputError(f"{count} tokens to generate: expected at least 1")
        return np.stack(list(self.tokens(prompt, count)), axis=1)


def _last_row(logits: Any, batch: int) -> np.ndarray:
    """(B, S, V), (B, V), (S, V) or (V,) to the last row of each text, (B, V)."""
    array = logits.numpy()
    rows = array.reshape(batch, -1, array.shape[-1])[:, -1]
    return rows.astype("float32")


def _flat(result: Any) -> list[Any]:
    if hasattr(result, "numpy"):
        return [result]
    return [leaf for item in result for leaf in _flat(item)]


def _leaves(ty: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if ty["kind"] == "tuple":
        return [leaf for field in ty["fields"] for leaf in _leaves(field)]
    return [ty]
